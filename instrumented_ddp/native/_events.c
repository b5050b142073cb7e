/* Events without times: to see whether a device has come to a point, and to let a stream wait for another. */

#include "_driver.h"

typedef struct {
    PyObject_HEAD
    Driver driver;
    unsigned generation;
    int device;
    void *context;
    void **pool;
    size_t count, room;
    PyObject *current_stream, *device_index, *on_capture;
} DeviceEvents;

typedef struct {
    PyObject_HEAD
    DeviceEvents *owner;
    void *event;
} DeviceEvent;

static PyTypeObject *event_type;

static int raise_code(DeviceEvents *self, int code) {
    if (code)
        driver_raise(&self->driver, code);
    return code ? -1 : 0;
}

/* -- the pool, which the interpreter lock protects ------------------------------------------------------------------- */

static void *take_event(DeviceEvents *self, int *code) {
    void *event = NULL;
    *code = 0;
    if (self->count)
        return self->pool[--self->count];
    *code = self->driver.event_create(&event, DISABLE_TIMING);
    return event;
}

static void give_event(DeviceEvents *self, void *event) {
    if (self->count == self->room) {
        size_t room = self->room ? 2 * self->room : 16;
        void **pool = realloc(self->pool, room * sizeof *pool);
        if (pool == NULL)
            return; /* it is lost, which is all that can be done without memory */
        self->pool = pool;
        self->room = room;
    }
    self->pool[self->count++] = event;
}

static int events_init(DeviceEvents *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"driver", "device_index", "current_stream", "on_capture", NULL};
    PyObject *device_index, *current_stream, *on_capture;
    const char *path, *problem;
    if (self->current_stream != NULL) {
        PyErr_SetString(PyExc_TypeError, "it is initialized once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sOOO", names, &path, &device_index, &current_stream, &on_capture))
        return -1;
    long index = PyLong_AsLong(device_index);
    if (PyErr_Occurred())
        return -1;
    if ((problem = driver_load(&self->driver, path)) != NULL) {
        PyErr_Format(PyExc_OSError, "%s can't be used: %s", path, problem);
        return -1;
    }
    self->generation = fork_generation;
    if (raise_code(self, self->driver.device_get(&self->device, (int)index)) ||
        raise_code(self, self->driver.context_retain(&self->context, self->device)))
        return -1;
    self->current_stream = Py_NewRef(current_stream);
    self->device_index = Py_NewRef(device_index);
    self->on_capture = Py_NewRef(on_capture);
    return 0;
}

static int events_traverse(DeviceEvents *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->current_stream);
    Py_VISIT(self->on_capture);
    return 0;
}

static int events_clear(DeviceEvents *self) {
    Py_CLEAR(self->current_stream);
    Py_CLEAR(self->device_index);
    Py_CLEAR(self->on_capture);
    return 0;
}

static void events_dealloc(DeviceEvents *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    int is_pushed;
    PyObject_GC_UnTrack(self);
    events_clear(self);
    if (self->context != NULL && self->generation == fork_generation &&
        driver_enter(&self->driver, self->context, &is_pushed) == 0) {
        for (size_t at = 0; at < self->count; at++)
            self->driver.event_destroy(self->pool[at]);
        driver_leave(&self->driver, is_pushed);
        self->driver.context_release(self->device);
    }
    free(self->pool);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* -- events ---------------------------------------------------------------------------------------------------------- */

/* Record an event of the pool on a stream. Return it; NULL with a code, or 0 in a capture. */
static void *record_on(DeviceEvents *self, void *stream, int *code) {
    if (driver_is_capturing(&self->driver, stream, code) || *code)
        return NULL;
    void *event = take_event(self, code);
    if (event == NULL)
        return NULL;
    *code = self->driver.event_record(event, stream);
    if (*code == 0)
        return event;
    give_event(self, event);
    return NULL;
}

static int tell_of_capture(DeviceEvents *self) {
    PyObject *said = PyObject_CallFunctionObjArgs(self->on_capture, NULL);
    Py_XDECREF(said);
    return said == NULL ? -1 : 0;
}

static PyObject *events_record(DeviceEvents *self, PyObject *Py_UNUSED(ignored)) {
    if (self->current_stream == NULL || self->generation != fork_generation)
        Py_RETURN_NONE;
    PyObject *pointer = PyObject_CallFunctionObjArgs(self->current_stream, self->device_index, NULL);
    void *stream = take_pointer(pointer), *event = NULL;
    if (stream == NULL && PyErr_Occurred())
        return NULL;
    int is_pushed, code = driver_enter(&self->driver, self->context, &is_pushed);
    if (code == 0) {
        event = record_on(self, stream, &code);
        driver_leave(&self->driver, is_pushed);
    }
    if (raise_code(self, code))
        return NULL;
    if (event == NULL)
        return tell_of_capture(self) ? NULL : Py_NewRef(Py_None);
    DeviceEvent *object = PyObject_New(DeviceEvent, event_type);
    if (object == NULL) {
        give_event(self, event);
        return NULL;
    }
    object->owner = (DeviceEvents *)Py_NewRef((PyObject *)self);
    object->event = event;
    return (PyObject *)object;
}

static PyObject *events_join(DeviceEvents *self, PyObject *waiting) {
    if (self->current_stream == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "it is not initialized");
        return NULL;
    }
    void *stream = take_pointer(PyObject_CallFunctionObjArgs(self->current_stream, self->device_index, NULL));
    void *target = PyErr_Occurred() ? NULL : pointer_of_stream(waiting);
    if (PyErr_Occurred())
        return NULL;
    int is_pushed, code = driver_enter(&self->driver, self->context, &is_pushed), is_joined = code == 0;
    if (code == 0 && stream != target) {
        void *event = record_on(self, stream, &code);
        is_joined = event != NULL;
        if (is_joined) {
            code = self->driver.stream_wait_event(target, event, 0);
            give_event(self, event); /* what waits is what it was recorded as, even if it is recorded again */
        }
    }
    driver_leave(&self->driver, is_pushed);
    if (raise_code(self, code) || (!is_joined && tell_of_capture(self)))
        return NULL;
    return PyBool_FromLong(is_joined);
}

static PyObject *event_query(DeviceEvent *self, PyObject *Py_UNUSED(ignored)) {
    Driver *driver = &self->owner->driver;
    int is_pushed, code = driver_enter(driver, self->owner->context, &is_pushed);
    if (code == 0)
        code = driver->event_query(self->event);
    driver_leave(driver, is_pushed);
    if (code == NOT_READY)
        Py_RETURN_FALSE;
    if (raise_code(self->owner, code))
        return NULL;
    Py_RETURN_TRUE;
}

static void event_dealloc(DeviceEvent *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    give_event(self->owner, self->event);
    Py_DECREF((PyObject *)self->owner);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef event_methods[] = {
    {"query", (PyCFunction)event_query, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef events_methods[] = {
    {"record", (PyCFunction)events_record, METH_NOARGS, NULL},
    {"join", (PyCFunction)events_join, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot event_slots[] = {{Py_tp_dealloc, event_dealloc}, {Py_tp_methods, event_methods}, {0, NULL}};
static PyType_Spec event_spec = {"instrumented_ddp.native._native.DeviceEvent", sizeof(DeviceEvent), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, event_slots};

static PyType_Slot events_slots[] = {
    {Py_tp_init, events_init},       {Py_tp_traverse, events_traverse}, {Py_tp_clear, events_clear},
    {Py_tp_dealloc, events_dealloc}, {Py_tp_methods, events_methods},   {0, NULL},
};
static PyType_Spec events_spec = {"instrumented_ddp.native._native.DeviceEvents", sizeof(DeviceEvents), 0, TYPE_FLAGS,
                                  events_slots};

int add_events(PyObject *module) {
    if (event_type == NULL)
        event_type = (PyTypeObject *)PyType_FromSpec(&event_spec);
    return event_type == NULL || add_type(module, &events_spec) ? -1 : 0;
}
