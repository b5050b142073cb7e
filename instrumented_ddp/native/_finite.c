/* A look at some elements of gradients, where they lie. The twin in Python says why. */

#include "_native.h"

typedef struct {
    Py_ssize_t start, rows, columns;
} Gradient;

typedef struct {
    PyObject_HEAD
    int kind;
    Py_ssize_t count;
    Gradient *gradients;
} FiniteProbe;

enum { FLOAT16, BFLOAT16, FLOAT32, FLOAT64, KINDS };
enum { WHOLE = 1024 };

static int probe_init(FiniteProbe *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"kind", "gradients", NULL};
    PyObject *gradients;
    int kind;
    if (self->gradients != NULL) {
        PyErr_SetString(PyExc_TypeError, "a probe is initialized once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO", names, &kind, &gradients))
        return -1;
    if (kind < 0 || kind >= KINDS) {
        PyErr_SetString(PyExc_ValueError, "no such kind of element");
        return -1;
    }
    Py_ssize_t count = PySequence_Size(gradients);
    if (count < 0)
        return -1;
    self->gradients = PyMem_Calloc(count + 1, sizeof *self->gradients);
    if (self->gradients == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->kind = kind;
    for (Py_ssize_t at = 0; at < count; at++) {
        Gradient *one = self->gradients + at;
        PyObject *shape = PySequence_GetItem(gradients, at);
        int is_read = shape != NULL && PyArg_ParseTuple(shape, "nnn", &one->start, &one->rows, &one->columns);
        Py_XDECREF(shape);
        if (!is_read)
            return -1;
        if (one->start < 0 || one->rows < 1 || one->columns < 1) {
            PyErr_SetString(PyExc_ValueError, "no such gradient");
            return -1;
        }
        self->count = at + 1;
    }
    return 0;
}

static void probe_dealloc(FiniteProbe *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyMem_Free(self->gradients);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Return whether all bits of the exponent are set. */
static int is_special(const void *memory, int kind, Py_ssize_t place) {
    switch (kind) {
    case FLOAT16:
        return (((const uint16_t *)memory)[place] & 0x7C00) == 0x7C00;
    case BFLOAT16:
        return (((const uint16_t *)memory)[place] & 0x7F80) == 0x7F80;
    case FLOAT32:
        return (((const uint32_t *)memory)[place] & 0x7F800000) == 0x7F800000;
    default:
        return (((const uint64_t *)memory)[place] & 0x7FF0000000000000) == 0x7FF0000000000000;
    }
}

static PyObject *probe_is_finite(FiniteProbe *self, PyObject *args) {
    unsigned long long address;
    Py_ssize_t turn, share;
    if (!PyArg_ParseTuple(args, "Knn", &address, &turn, &share))
        return NULL;
    const void *memory = (const void *)(uintptr_t)address;
    share = share < 0 ? 0 : share > WHOLE ? WHOLE : share;
    for (Py_ssize_t at = 0; at < self->count; at++) {
        const Gradient *one = self->gradients + at;
        Py_ssize_t length = one->rows > one->columns ? one->rows : one->columns;
        Py_ssize_t more = share * length / WHOLE, looks = more < length ? more + 1 : length;
        Py_ssize_t first = (Py_ssize_t)((size_t)turn * (size_t)looks % (size_t)length);
        Py_ssize_t row = first % one->rows, column = first % one->columns;
        for (; looks > 0; looks--) {
            if (is_special(memory, self->kind, one->start + row * one->columns + column))
                Py_RETURN_FALSE;
            if (++first == length)
                first = row = column = 0;
            else {
                row = row + 1 == one->rows ? 0 : row + 1;
                column = column + 1 == one->columns ? 0 : column + 1;
            }
        }
    }
    Py_RETURN_TRUE;
}

static PyMethodDef probe_methods[] = {
    {"is_finite", (PyCFunction)probe_is_finite, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot probe_slots[] = {
    {Py_tp_init, probe_init}, {Py_tp_dealloc, probe_dealloc}, {Py_tp_methods, probe_methods}, {0, NULL}};

static PyType_Spec probe_spec = {"instrumented_ddp.native._native.FiniteProbe", sizeof(FiniteProbe), 0,
                                 Py_TPFLAGS_DEFAULT, probe_slots};

int add_finite(PyObject *module) { return add_type(module, &probe_spec); }
