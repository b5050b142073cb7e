/* Countdown of gradients by bucket, and the hooks that autograd calls. */

#include "_native.h"

#define READY 0x0101010101010101

typedef struct {
    PyObject_HEAD
    Py_buffer ready_ns;
    Py_ssize_t parameters, buckets, arrived;
    int32_t *bucket_of, *order, *pending, *sizes;
    char *is_large;
    char is_expecting, has_begun, is_direct, stamps;
    PyObject *listener[4]; /* on_bucket_ready, on_large, on_other, on_repeated */
} Countdown;

enum { ON_BUCKET_READY, ON_LARGE, ON_OTHER, ON_REPEATED };

static void free_plan(Countdown *self) {
    PyMem_Free(self->pending);
    PyMem_Free(self->sizes);
    self->pending = self->sizes = NULL;
    self->buckets = 0;
}

static int countdown_init(Countdown *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"ready_ns", "on_bucket_ready", "on_large", "on_other", "on_repeated", NULL};
    PyObject *ready_ns, *listener[4];
    if (self->order != NULL) {
        PyErr_SetString(PyExc_TypeError, "a countdown is initialized once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO", names, &ready_ns, &listener[0], &listener[1], &listener[2],
                                     &listener[3]) ||
        PyObject_GetBuffer(ready_ns, &self->ready_ns, PyBUF_WRITABLE))
        return -1;
    for (int kind = 0; kind < 4; kind++)
        self->listener[kind] = Py_NewRef(listener[kind]);
    self->parameters = self->ready_ns.len / 8;
    self->bucket_of = PyMem_Calloc(self->parameters + 1, sizeof *self->bucket_of);
    self->order = PyMem_Calloc(self->parameters + 1, sizeof *self->order);
    self->is_large = PyMem_Calloc(self->parameters + 1, 1);
    if (self->bucket_of == NULL || self->order == NULL || self->is_large == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->is_direct = 1;
    return 0;
}

static int countdown_traverse(Countdown *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    for (int kind = 0; kind < 4; kind++)
        Py_VISIT(self->listener[kind]);
    return 0;
}

/* Only callbacks are released: a hook may still be called, and finds nothing to expect. */
static int countdown_clear(Countdown *self) {
    for (int kind = 0; kind < 4; kind++)
        Py_CLEAR(self->listener[kind]);
    self->is_expecting = 0;
    return 0;
}

static void countdown_dealloc(Countdown *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    countdown_clear(self);
    free_plan(self);
    PyBuffer_Release(&self->ready_ns);
    PyMem_Free(self->bucket_of);
    PyMem_Free(self->order);
    PyMem_Free(self->is_large);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int tell(Countdown *self, int kind, Py_ssize_t number) {
    if (self->listener[kind] == NULL)
        return 0;
    PyObject *said = PyObject_CallFunction(self->listener[kind], "n", number);
    Py_XDECREF(said);
    return said == NULL ? -1 : 0;
}

/* Note a gradient, and call for its bucket when that was the last one. */
static int mark(Countdown *self, Py_ssize_t index, int64_t ready_ns, int is_arrival) {
    int64_t *ready = (int64_t *)self->ready_ns.buf + index;
    if (*ready != 0)
        return tell(self, ON_REPEATED, index);
    *ready = ready_ns;
    if (is_arrival && self->arrived < self->parameters) /* more only if somebody else clears times */
        self->order[self->arrived++] = (int32_t)index;
    self->has_begun = 1;
    int32_t bucket = self->bucket_of[index];
    if (self->is_large[index] && tell(self, ON_LARGE, index))
        return -1;
    if (bucket >= self->buckets || --self->pending[bucket] != 0)
        return 0;
    return tell(self, ON_BUCKET_READY, bucket);
}

static PyObject *countdown_mark(Countdown *self, PyObject *args) {
    Py_ssize_t index;
    long long ready_ns;
    int is_arrival;
    if (!PyArg_ParseTuple(args, "nLp", &index, &ready_ns, &is_arrival))
        return NULL;
    if (index < 0 || index >= self->parameters) {
        PyErr_SetString(PyExc_IndexError, "no such parameter");
        return NULL;
    }
    if (mark(self, index, ready_ns, is_arrival))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *countdown_reset(Countdown *self, PyObject *Py_UNUSED(ignored)) {
    memset(self->ready_ns.buf, 0, (size_t)self->ready_ns.len);
    if (self->buckets)
        memcpy(self->pending, self->sizes, (size_t)self->buckets * sizeof *self->pending);
    self->arrived = 0;
    Py_RETURN_NONE;
}

/* Return the parameter at a position of a sequence; -1 with an error. */
static Py_ssize_t parameter_at(Countdown *self, PyObject *sequence, Py_ssize_t at) {
    PyObject *item = PySequence_GetItem(sequence, at);
    Py_ssize_t index = item == NULL ? -1 : PyLong_AsSsize_t(item);
    Py_XDECREF(item);
    if (index >= 0 && index < self->parameters)
        return index;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_IndexError, "no such parameter");
    return -1;
}

static PyObject *countdown_adopt(Countdown *self, PyObject *args) {
    PyObject *buckets, *large;
    if (!PyArg_ParseTuple(args, "OO", &buckets, &large))
        return NULL;
    Py_ssize_t count = PySequence_Size(buckets), large_count = PySequence_Size(large);
    if (count < 0 || large_count < 0)
        return NULL;
    free_plan(self);
    self->pending = PyMem_Calloc(count + 1, sizeof *self->pending);
    self->sizes = PyMem_Calloc(count + 1, sizeof *self->sizes);
    if (self->pending == NULL || self->sizes == NULL)
        return PyErr_NoMemory();
    memset(self->is_large, 0, self->parameters);
    for (Py_ssize_t at = 0; at < large_count; at++) {
        Py_ssize_t index = parameter_at(self, large, at);
        if (index < 0)
            return NULL;
        self->is_large[index] = 1;
    }
    for (Py_ssize_t bucket = 0; bucket < count; bucket++) {
        PyObject *indices = PySequence_GetItem(buckets, bucket);
        Py_ssize_t size = indices == NULL ? -1 : PySequence_Size(indices);
        for (Py_ssize_t at = 0; at < size; at++) {
            Py_ssize_t index = parameter_at(self, indices, at);
            if (index < 0)
                size = -1;
            else
                self->bucket_of[index] = (int32_t)bucket;
        }
        Py_XDECREF(indices);
        if (size < 0)
            return NULL;
        self->sizes[bucket] = (int32_t)size;
    }
    self->buckets = count;
    return countdown_reset(self, NULL);
}

static PyObject *countdown_order(Countdown *self, void *Py_UNUSED(closure)) {
    PyObject *order = PyList_New(self->arrived);
    for (Py_ssize_t at = 0; order != NULL && at < self->arrived; at++)
        if (PyList_SetItem(order, at, PyLong_FromLong(self->order[at])))
            Py_CLEAR(order);
    return order;
}

/* What autograd calls: a function whose `self` is the countdown and an index. */
typedef struct {
    PyObject_HEAD
    Countdown *countdown;
    Py_ssize_t index;
} Hook;

static PyObject *hook_call(Hook *self, PyObject *Py_UNUSED(gradients)) {
    Countdown *countdown = self->countdown;
    int failed;
    if (countdown == NULL)
        Py_RETURN_NONE;
    if (countdown->is_expecting && countdown->is_direct) {
        int64_t ready_ns = READY;
        if (countdown->stamps)
            ready_ns = host_now_ns();
        failed = mark(countdown, self->index, ready_ns, 1);
    } else
        failed = tell(countdown, ON_OTHER, self->index);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static int hook_traverse(Hook *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT((PyObject *)self->countdown);
    return 0;
}

static int hook_clear(Hook *self) {
    Py_CLEAR(self->countdown);
    return 0;
}

static PyType_Slot hook_slots[] = {
    {Py_tp_traverse, hook_traverse}, {Py_tp_clear, hook_clear}, {Py_tp_dealloc, dealloc}, {0, NULL}};
static PyType_Spec hook_spec = {"instrumented_ddp.native._native.Hook", sizeof(Hook), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                hook_slots};
static PyTypeObject *hook_type;

static PyObject *countdown_make_hook(Countdown *self, PyObject *number) {
    static PyMethodDef definition = {"hook", (PyCFunction)hook_call, METH_VARARGS, NULL};
    Py_ssize_t index = PyLong_AsSsize_t(number);
    if (index < 0 || index >= self->parameters) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_IndexError, "no such parameter");
        return NULL;
    }
    Hook *hook = PyObject_GC_New(Hook, hook_type);
    if (hook == NULL)
        return NULL;
    hook->countdown = (Countdown *)Py_NewRef((PyObject *)self);
    hook->index = index;
    PyObject_GC_Track(hook);
    PyObject *function = PyCFunction_NewEx(&definition, (PyObject *)hook, NULL);
    Py_DECREF((PyObject *)hook);
    return function;
}

static PyMemberDef countdown_members[] = {
    {"is_expecting", T_BOOL, offsetof(Countdown, is_expecting), 0, NULL},
    {"has_begun", T_BOOL, offsetof(Countdown, has_begun), 0, NULL},
    {"is_direct", T_BOOL, offsetof(Countdown, is_direct), 0, NULL},
    {"stamps", T_BOOL, offsetof(Countdown, stamps), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef countdown_getters[] = {{"order", (getter)countdown_order, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};

static PyMethodDef countdown_methods[] = {
    {"adopt", (PyCFunction)countdown_adopt, METH_VARARGS, NULL},
    {"reset", (PyCFunction)countdown_reset, METH_NOARGS, NULL},
    {"mark", (PyCFunction)countdown_mark, METH_VARARGS, NULL},
    {"make_hook", (PyCFunction)countdown_make_hook, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot countdown_slots[] = {
    {Py_tp_init, countdown_init},       {Py_tp_traverse, countdown_traverse}, {Py_tp_clear, countdown_clear},
    {Py_tp_dealloc, countdown_dealloc}, {Py_tp_members, countdown_members},   {Py_tp_getset, countdown_getters},
    {Py_tp_methods, countdown_methods}, {0, NULL},
};

static PyType_Spec countdown_spec = {"instrumented_ddp.native._native.Countdown", sizeof(Countdown), 0, TYPE_FLAGS,
                                     countdown_slots};

int add_countdown(PyObject *module) {
    if (hook_type == NULL)
        hook_type = (PyTypeObject *)PyType_FromSpec(&hook_spec);
    return hook_type == NULL || add_type(module, &countdown_spec) ? -1 : 0;
}
