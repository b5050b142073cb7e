/* What runs for every gradient, record and collective, in C.
 *
 * `_native.pyi` is the contract. The twins in Python say why things are as they are, and pass the same tests:
 * `overlapscope.trace.event_log.RecordStore`, `overlapscope.trace.collective_log.EntryStore` and
 * `instrumented_ddp.native.countdown.Countdown`. Against Python's limited API and without torch's headers, so that one
 * build serves all versions of both. The interpreter lock is held throughout.
 */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#define HEADER_BYTES 4096
#define RECORD_BYTES 64
#define BODY_BYTES 28
#define ENTRY_BYTES 64

/* -- checksums ---------------------------------------------------------------------------------------------------- */

static uint32_t crc_table[8][256];

/* Table k has the CRC-32 of a byte with k zero bytes after it: eight bytes are looked up at once. */
static void make_crc_table(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ 0xEDB88320u : crc >> 1;
        crc_table[0][byte] = crc;
    }
    for (int zeros = 1; zeros < 8; zeros++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t before = crc_table[zeros - 1][byte];
            crc_table[zeros][byte] = before >> 8 ^ crc_table[0][before & 0xFF];
        }
}

static uint32_t crc32_of(const unsigned char *data, size_t size) {
    uint32_t crc = 0xFFFFFFFFu;
    for (; size >= 8; size -= 8, data += 8) {
        uint32_t low, high;
        memcpy(&low, data, 4);
        memcpy(&high, data + 4, 4);
        low ^= crc;
        crc = crc_table[7][low & 0xFF] ^ crc_table[6][low >> 8 & 0xFF] ^ crc_table[5][low >> 16 & 0xFF] ^
              crc_table[4][low >> 24] ^ crc_table[3][high & 0xFF] ^ crc_table[2][high >> 8 & 0xFF] ^
              crc_table[1][high >> 16 & 0xFF] ^ crc_table[0][high >> 24];
    }
    while (size--)
        crc = crc >> 8 ^ crc_table[0][(crc ^ *data++) & 0xFF];
    return ~crc;
}

/* The upper half of Adler-32, the sum of running sums. 64 bytes can't overflow 32 bits before the modulo. */
static uint16_t adler_check(const unsigned char *entry) {
    uint32_t sum = 1, sums = 0;
    for (int at = 0; at < ENTRY_BYTES; at++) {
        sum += entry[at];
        sums += sum;
    }
    return (uint16_t)(sums % 65521);
}

/* -- stores: a mapped ring of slots, and a callback that allocates disk blocks --------------------------------------- */

typedef struct {
    PyObject_HEAD
    Py_buffer buffer;
    PyObject *make_room;
    unsigned long long latest, allocated, capacity;
    unsigned long long hash, names_hash; /* of entries */
} Store;

static int store_map(Store *self, PyObject *buffer) {
    Py_buffer mapped;
    if (PyObject_GetBuffer(buffer, &mapped, PyBUF_WRITABLE))
        return -1;
    PyBuffer_Release(&self->buffer);
    self->buffer = mapped;
    return 0;
}

static int store_init(Store *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"buffer", "make_room", NULL};
    PyObject *buffer, *make_room;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO", names, &buffer, &make_room) || store_map(self, buffer))
        return -1;
    Py_CLEAR(self->make_room);
    self->make_room = Py_NewRef(make_room);
    return 0;
}

/* Buffers are not visited: a memoryview that a collection clears before it is released can't be released any more. */
static int store_traverse(Store *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->make_room);
    return 0;
}

static int store_clear(Store *self) {
    Py_CLEAR(self->make_room);
    PyBuffer_Release(&self->buffer);
    self->buffer.buf = NULL;
    return 0;
}

static void dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    ((inquiry)PyType_GetSlot(type, Py_tp_clear))(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *store_replace_buffer(Store *self, PyObject *buffer) {
    if (store_map(self, buffer))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *store_close(Store *self, PyObject *Py_UNUSED(ignored)) {
    PyBuffer_Release(&self->buffer);
    self->buffer.buf = NULL; /* which PyBuffer_Release leaves */
    Py_RETURN_NONE;
}

/* Return the slot of a new item; NULL if the log is closed, or with an error. */
static unsigned char *make_slot(Store *self, unsigned long long number, size_t slot_bytes) {
    unsigned long long offset = HEADER_BYTES + (number - 1) * slot_bytes;
    if (number > self->allocated) {
        PyObject *made = PyObject_CallFunction(self->make_room, "K", number);
        if (made == NULL)
            return NULL;
        offset = PyLong_AsUnsignedLongLong(made);
        Py_DECREF(made);
        if (PyErr_Occurred())
            return NULL;
    }
    if (self->buffer.buf == NULL) /* closed meanwhile */
        return NULL;
    if (offset + slot_bytes > (unsigned long long)self->buffer.len) {
        PyErr_SetString(PyExc_IndexError, "the slot is beyond the end of the log");
        return NULL;
    }
    return (unsigned char *)self->buffer.buf + offset;
}

/* -- records --------------------------------------------------------------------------------------------------------- */

static PyObject *append(Store *self, PyObject *const *args, Py_ssize_t count) {
    char *body;
    Py_ssize_t size;
    if (count != 4 && count != 5) {
        PyErr_SetString(PyExc_TypeError, "append takes body, step, start_ns, end_ns and perhaps end_uncertainty_ns");
        return NULL;
    }
    if (PyBytes_AsStringAndSize(args[0], &body, &size))
        return NULL;
    unsigned long step = PyLong_AsUnsignedLong(args[1]);
    long long start_ns = PyLong_AsLongLong(args[2]), end_ns = PyLong_AsLongLong(args[3]);
    unsigned long uncertainty_ns = count == 5 ? PyLong_AsUnsignedLong(args[4]) : 0;
    if (PyErr_Occurred())
        return NULL;
    if (size != BODY_BYTES || step > UINT32_MAX || uncertainty_ns > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "a record has a body of 28 bytes, and 32 bits for step and uncertainty");
        return NULL;
    }
    if (self->buffer.buf == NULL) /* training goes on after the recording */
        Py_RETURN_NONE;
    unsigned long long sequence = ++self->latest;
    unsigned char *slot = make_slot(self, sequence, RECORD_BYTES);
    if (slot == NULL)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    unsigned char record[RECORD_BYTES];
    uint32_t narrow[2] = {(uint32_t)step, (uint32_t)uncertainty_ns};
    memcpy(record + 4, &start_ns, 8);
    memcpy(record + 12, &end_ns, 8);
    memcpy(record + 20, narrow, 8);
    memcpy(record + 28, body, BODY_BYTES);
    memcpy(record + 56, &sequence, 8);
    uint32_t crc = crc32_of(record + 4, RECORD_BYTES - 4);
    memcpy(record, &crc, 4);
    memcpy(slot, record, RECORD_BYTES);
    Py_RETURN_NONE;
}

/* -- entries --------------------------------------------------------------------------------------------------------- */

/* In the order in which they are stored, without padding on any ABI that has this alignment. */
typedef struct {
    uint32_t number, signature, call_site, step, batch;
    uint8_t phase, flags;
    uint16_t check;
    uint64_t hash, names_hash;
    int64_t announced_ns, launched_ns, completed_ns;
} Entry;

_Static_assert(sizeof(Entry) == ENTRY_BYTES, "an entry is stored as it is in memory");

/* splitmix64, as `entry_digest`. */
static uint64_t digest(uint64_t signature_hash, uint64_t number, uint64_t step_and_one) {
    uint64_t x = signature_hash + 0x9E3779B97F4A7C15u * number + 0xD6E8FEB86659FD93u * step_and_one;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static PyObject *announce(Store *self, PyObject *args) {
    unsigned int signature, step, call_site, batch;
    unsigned char phase, flags;
    unsigned long long signature_hash, names_hash;
    long long hashed_step, now_ns;
    if (!PyArg_ParseTuple(args, "IKKLLIIIbb", &signature, &signature_hash, &names_hash, &hashed_step, &now_ns, &step,
                          &call_site, &batch, &phase, &flags))
        return NULL;
    if (self->buffer.buf == NULL)
        return PyLong_FromLong(0);
    unsigned long long number;
    unsigned char *slot;
    do { /* another thread may have announced one while room was made */
        number = self->latest + 1;
        slot = make_slot(self, number, ENTRY_BYTES);
        if (slot == NULL)
            return PyErr_Occurred() ? NULL : PyLong_FromLong(0);
    } while (number != self->latest + 1);
    self->latest = number;
    self->hash += digest(signature_hash, number, (uint64_t)(hashed_step + 1));
    if (names_hash)
        self->names_hash += digest(names_hash, number, 0);
    Entry entry = {
        .number = (uint32_t)number,
        .signature = signature,
        .call_site = call_site,
        .step = step,
        .batch = batch,
        .phase = phase,
        .flags = flags,
        .hash = self->hash,
        .names_hash = self->names_hash,
        .announced_ns = now_ns,
    };
    entry.check = adler_check((unsigned char *)&entry);
    /* The number is written last: until then no reader takes this for an entry. */
    __atomic_store_n((uint32_t *)slot, 0, __ATOMIC_RELEASE);
    memcpy(slot + 4, (unsigned char *)&entry + 4, ENTRY_BYTES - 4);
    __atomic_store_n((uint32_t *)slot, entry.number, __ATOMIC_RELEASE);
    return PyLong_FromUnsignedLongLong(number);
}

static PyObject *update(Store *self, PyObject *args) {
    unsigned long long number;
    const char *field;
    long long time_ns;
    unsigned char flags;
    if (!PyArg_ParseTuple(args, "KzLb", &number, &field, &time_ns, &flags))
        return NULL;
    /* The slot may hold a later entry by now. */
    if (number == 0 || number > self->latest || number + self->capacity <= self->latest || self->buffer.buf == NULL)
        Py_RETURN_NONE;
    unsigned char *slot = (unsigned char *)self->buffer.buf + HEADER_BYTES + (number - 1) % self->capacity * ENTRY_BYTES;
    Entry entry;
    memcpy(&entry, slot, ENTRY_BYTES);
    if (field != NULL && field[0] == 'l')
        entry.launched_ns = time_ns;
    else if (field != NULL)
        entry.completed_ns = time_ns;
    entry.flags |= flags;
    entry.check = 0;
    entry.check = adler_check((unsigned char *)&entry);
    memcpy(slot + 4, (unsigned char *)&entry + 4, ENTRY_BYTES - 4);
    Py_RETURN_NONE;
}

static PyMemberDef store_members[] = {
    {"latest", T_ULONGLONG, offsetof(Store, latest), 0, NULL},
    {"allocated", T_ULONGLONG, offsetof(Store, allocated), 0, NULL},
    {"capacity", T_ULONGLONG, offsetof(Store, capacity), 0, NULL},
    {"hash", T_ULONGLONG, offsetof(Store, hash), READONLY, NULL},
    {"names_hash", T_ULONGLONG, offsetof(Store, names_hash), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

#define STORE_METHODS                                              \
    {"replace_buffer", (PyCFunction)store_replace_buffer, METH_O, NULL}, \
    {"close", (PyCFunction)store_close, METH_NOARGS, NULL}

#define STORE_SLOTS                                                                                           \
    {Py_tp_init, store_init}, {Py_tp_traverse, store_traverse}, {Py_tp_clear, store_clear},                   \
        {Py_tp_dealloc, dealloc}, {Py_tp_members, store_members}

static PyMethodDef record_store_methods[] = {
    {"append", (PyCFunction)(void (*)(void))append, METH_FASTCALL, NULL},
    STORE_METHODS,
    {NULL, NULL, 0, NULL},
};

static PyMethodDef entry_store_methods[] = {
    {"announce", (PyCFunction)announce, METH_VARARGS, NULL},
    {"update", (PyCFunction)update, METH_VARARGS, NULL},
    STORE_METHODS,
    {NULL, NULL, 0, NULL},
};

static PyType_Slot record_store_slots[] = {STORE_SLOTS, {Py_tp_methods, record_store_methods}, {0, NULL}};
static PyType_Slot entry_store_slots[] = {STORE_SLOTS, {Py_tp_methods, entry_store_methods}, {0, NULL}};

/* -- gradients: a countdown by bucket -------------------------------------------------------------------------------- */

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
    if (is_arrival)
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
        if (countdown->stamps) {
            struct timespec now;
            clock_gettime(CLOCK_MONOTONIC, &now);
            ready_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
        }
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

/* -- the module ------------------------------------------------------------------------------------------------------ */

#define TYPE_FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC)

static PyType_Spec type_specs[] = {
    {"instrumented_ddp.native._native.RecordStore", sizeof(Store), 0, TYPE_FLAGS, record_store_slots},
    {"instrumented_ddp.native._native.EntryStore", sizeof(Store), 0, TYPE_FLAGS, entry_store_slots},
    {"instrumented_ddp.native._native.Countdown", sizeof(Countdown), 0, TYPE_FLAGS, countdown_slots},
};

static int execute(PyObject *module) {
    if (PyModule_AddIntConstant(module, "INTERFACE", 1))
        return -1;
    make_crc_table();
    for (size_t at = 0; at < sizeof type_specs / sizeof *type_specs; at++) {
        PyObject *type = PyType_FromModuleAndSpec(module, &type_specs[at], NULL);
        if (type == NULL || PyModule_AddType(module, (PyTypeObject *)type))
            return -1;
        Py_DECREF(type);
    }
    if (hook_type == NULL)
        hook_type = (PyTypeObject *)PyType_FromSpec(&hook_spec);
    return hook_type == NULL ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, NULL, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
