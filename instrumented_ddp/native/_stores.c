/* Stores of both logs: checksums, records and entries in a mapped ring of slots. */

#include "_native.h"

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

static PyType_Spec record_store_spec = {"instrumented_ddp.native._native.RecordStore", sizeof(Store), 0, TYPE_FLAGS,
                                        record_store_slots};
static PyType_Spec entry_store_spec = {"instrumented_ddp.native._native.EntryStore", sizeof(Store), 0, TYPE_FLAGS,
                                       entry_store_slots};

int add_stores(PyObject *module) {
    make_crc_table();
    return add_type(module, &record_store_spec) || add_type(module, &entry_store_spec) ? -1 : 0;
}
