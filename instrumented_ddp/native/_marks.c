/* What Python sees of a device's time line: a timer, and its marks. */

#include "_timeline.h"

typedef struct {
    PyObject_HEAD
    Mark *mark;
} MarkObject;

typedef struct {
    PyObject_HEAD
    Timeline *timeline;
    PyObject *store, *current_stream, *device_index, *on_capture, *on_failure, *flags;
    char is_closed, has_reported;
} EventTimer;

static PyTypeObject *mark_type;

static void mark_dealloc(MarkObject *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    mark_release(self->mark);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot mark_slots[] = {{Py_tp_dealloc, mark_dealloc}, {0, NULL}};
static PyType_Spec mark_spec = {"instrumented_ddp.native._native.Mark", sizeof(MarkObject), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, mark_slots};

/* -- the timer ------------------------------------------------------------------------------------------------------- */

static int timer_init(EventTimer *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"store",          "driver",     "device_index", "anchor_stream",
                            "current_stream", "on_capture", "on_failure",   "flags", NULL};
    PyObject *store, *device_index, *anchor_stream, *current_stream, *on_capture, *on_failure, *flags;
    const char *path, *problem;
    Driver driver = {0};
    if (self->timeline != NULL) {
        PyErr_SetString(PyExc_TypeError, "a timer is initialized once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OsOOOOOO", names, &store, &path, &device_index, &anchor_stream,
                                     &current_stream, &on_capture, &on_failure, &flags))
        return -1;
    void *stream = PyLong_AsVoidPtr(anchor_stream);
    long index = PyLong_AsLong(device_index);
    if (PyErr_Occurred())
        return -1;
    if ((problem = driver_load(&driver, path)) != NULL) {
        PyErr_Format(PyExc_OSError, "%s can't be used: %s", path, problem);
        return -1;
    }
    Slots *slots = slots_of_record_store(store);
    if (slots == NULL)
        return -1;
    self->timeline = timeline_new(&driver, slots, stream);
    if (self->timeline == NULL) {
        slots_release(slots);
        PyErr_NoMemory();
        return -1;
    }
    self->store = Py_NewRef(store);
    self->device_index = Py_NewRef(device_index);
    self->current_stream = Py_NewRef(current_stream);
    self->on_capture = Py_NewRef(on_capture);
    self->on_failure = Py_NewRef(on_failure);
    self->flags = Py_NewRef(flags);
    int code;
    Py_BEGIN_ALLOW_THREADS;
    code = timeline_begin(self->timeline, (int)index);
    Py_END_ALLOW_THREADS;
    if (code)
        driver_raise(&driver, code);
    return code ? -1 : 0;
}

static int timer_traverse(EventTimer *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->store);
    Py_VISIT(self->current_stream);
    Py_VISIT(self->on_capture);
    Py_VISIT(self->on_failure);
    Py_VISIT(self->flags);
    return 0;
}

static int timer_clear(EventTimer *self) {
    self->is_closed = 1;
    Py_CLEAR(self->store);
    Py_CLEAR(self->current_stream);
    Py_CLEAR(self->device_index);
    Py_CLEAR(self->on_capture);
    Py_CLEAR(self->on_failure);
    Py_CLEAR(self->flags);
    return 0;
}

static void timer_dealloc(EventTimer *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    timer_clear(self);
    if (self->timeline != NULL) {
        timeline_abandon(self->timeline);
        timeline_release(self->timeline);
    }
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int is_over(const EventTimer *self) {
    return self->timeline == NULL || self->is_closed || timeline_is_foreign(self->timeline);
}

/* Return whether marks can be made. Tell once that the device has failed; -1 with an error. */
static int is_working(EventTimer *self) {
    Timeline *timeline = self->timeline;
    if (is_over(self))
        return 0;
    int code = __atomic_load_n(&timeline->failure, __ATOMIC_ACQUIRE);
    if (code == 0)
        return 1;
    if (self->has_reported)
        return 0;
    self->has_reported = 1;
    char text[128];
    driver_describe_error(&timeline->driver, code, text, sizeof text);
    PyObject *said = PyObject_CallFunction(self->on_failure, "s", text);
    Py_XDECREF(said);
    return said == NULL ? -1 : 0;
}

/* Return the pointer of a stream, by default of the current one. */
static void *get_stream(EventTimer *self, PyObject *stream) {
    if (stream != NULL && stream != Py_None)
        return pointer_of_stream(stream);
    return take_pointer(PyObject_CallFunctionObjArgs(self->current_stream, self->device_index, NULL));
}

static PyObject *timer_mark(EventTimer *self, PyObject *const *args, Py_ssize_t count) {
    if (count > 1) {
        PyErr_SetString(PyExc_TypeError, "mark takes a stream, or nothing");
        return NULL;
    }
    int working = is_working(self), code;
    if (working <= 0)
        return working ? NULL : Py_NewRef(Py_None);
    if (__atomic_load_n(&self->timeline->slots->is_starved, __ATOMIC_RELAXED) && make_room_for_starved(self->store))
        return NULL;
    void *stream = get_stream(self, count ? args[0] : NULL);
    if (stream == NULL && PyErr_Occurred())
        return NULL;
    Mark *mark = timeline_mark(self->timeline, stream, &code);
    if (mark == NULL) {
        PyObject *said = code ? Py_NewRef(Py_None) : PyObject_CallFunctionObjArgs(self->on_capture, NULL);
        if (code && is_working(self) < 0)
            Py_CLEAR(said);
        Py_XDECREF(said);
        return said == NULL ? NULL : Py_NewRef(Py_None);
    }
    MarkObject *object = PyObject_New(MarkObject, mark_type);
    if (object == NULL)
        mark_release(mark);
    else
        object->mark = mark;
    return (PyObject *)object;
}

static PyObject *timer_write(EventTimer *self, PyObject *const *args, Py_ssize_t count) {
    char *body;
    Py_ssize_t size;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "write takes body, step, start and end");
        return NULL;
    }
    if (PyBytes_AsStringAndSize(args[0], &body, &size))
        return NULL;
    unsigned long step = PyLong_AsUnsignedLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (size != BODY_BYTES || step > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "a record has a body of 28 bytes, and 32 bits for the step");
        return NULL;
    }
    if (args[2] == Py_None || args[3] == Py_None || is_over(self))
        Py_RETURN_NONE;
    if (Py_TYPE(args[2]) != mark_type || Py_TYPE(args[3]) != mark_type) {
        PyErr_SetString(PyExc_TypeError, "start and end are marks of this timer, or None");
        return NULL;
    }
    if (timeline_write(self->timeline, (unsigned char *)body, (uint32_t)step, ((MarkObject *)args[2])->mark,
                       ((MarkObject *)args[3])->mark))
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *timer_start(EventTimer *self, PyObject *Py_UNUSED(ignored)) {
    int error = is_over(self) ? 0 : timeline_start(self->timeline);
    if (error) {
        PyErr_Format(PyExc_RuntimeError, "no thread can be started: error %d", error);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *timer_poll(EventTimer *self, PyObject *Py_UNUSED(ignored)) {
    if (is_working(self) > 0) {
        Py_BEGIN_ALLOW_THREADS;
        timeline_poll(self->timeline);
        Py_END_ALLOW_THREADS;
    }
    if (is_working(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *timer_on_step_start(EventTimer *self, PyObject *Py_UNUSED(ignored)) {
    if (is_working(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *timer_close(EventTimer *self, PyObject *Py_UNUSED(ignored)) {
    if (is_over(self))
        Py_RETURN_NONE;
    Py_BEGIN_ALLOW_THREADS;
    timeline_stop(self->timeline);
    Py_END_ALLOW_THREADS;
    int working = is_working(self);
    self->is_closed = 1;
    if (working < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef timer_methods[] = {
    {"mark", (PyCFunction)(void (*)(void))timer_mark, METH_FASTCALL, NULL},
    {"write", (PyCFunction)(void (*)(void))timer_write, METH_FASTCALL, NULL},
    {"start", (PyCFunction)timer_start, METH_NOARGS, NULL},
    {"poll", (PyCFunction)timer_poll, METH_NOARGS, NULL},
    {"on_step_start", (PyCFunction)timer_on_step_start, METH_NOARGS, NULL},
    {"close", (PyCFunction)timer_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef timer_members[] = {
    {"flags", T_OBJECT_EX, offsetof(EventTimer, flags), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot timer_slots[] = {
    {Py_tp_init, timer_init},       {Py_tp_traverse, timer_traverse}, {Py_tp_clear, timer_clear},
    {Py_tp_dealloc, timer_dealloc}, {Py_tp_members, timer_members},   {Py_tp_methods, timer_methods}, {0, NULL},
};
static PyType_Spec timer_spec = {"instrumented_ddp.native._native.EventTimer", sizeof(EventTimer), 0, TYPE_FLAGS,
                                 timer_slots};

int add_marks(PyObject *module) {
    if (mark_type == NULL)
        mark_type = (PyTypeObject *)PyType_FromSpec(&mark_spec);
    return mark_type == NULL || add_type(module, &timer_spec) ? -1 : 0;
}
