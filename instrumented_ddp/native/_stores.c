/* Stores of both logs: checksums, records and entries in a mapped ring of slots. */

#include "_native.h"

#define HEADER_BYTES 4096
#define RECORD_BYTES 64
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
    Slots *slots;
    unsigned long long hash, names_hash; /* of entries */
} Store;

unsigned fork_generation;

static void count_fork(void) { fork_generation++; }

static Slots *slots_new(void) {
    Slots *slots = calloc(1, sizeof *slots);
    if (slots == NULL)
        return NULL;
    slots->references = 1;
    slots->generation = fork_generation;
    pthread_mutex_init(&slots->lock, NULL);
    return slots;
}

void slots_release(Slots *slots) {
    if (slots != NULL && __atomic_sub_fetch(&slots->references, 1, __ATOMIC_ACQ_REL) == 0)
        free(slots);
}

static void slots_lock(Slots *slots) {
    if (slots->generation != fork_generation) { /* only its own thread runs in a new process: no other is here */
        slots->generation = fork_generation;
        pthread_mutex_init(&slots->lock, NULL);
    }
    pthread_mutex_lock(&slots->lock);
}

static void slots_unlock(Slots *slots) { pthread_mutex_unlock(&slots->lock); }

/* Return the file offset of an item; 0 if disk blocks have to be allocated for it. */
static unsigned long long offset_of(const Slots *slots, unsigned long long number, size_t slot_bytes) {
    unsigned long long slot = number - 1;
    if (number > slots->allocated) {
        if (slots->allocated < slots->capacity || slots->capacity <= slots->pinned)
            return 0;
        slot = slots->pinned + (slot - slots->pinned) % (slots->capacity - slots->pinned);
    }
    unsigned long long offset = HEADER_BYTES + slot * slot_bytes;
    return offset + slot_bytes <= slots->bytes ? offset : 0;
}

/* Return whether room that was made is not enough: the callback has a fault, or the buffer is too small. */
static int is_still_full(Slots *slots, unsigned long long number, size_t slot_bytes) {
    slots_lock(slots);
    int is_full = slots->memory != NULL && slots->latest < number && offset_of(slots, number, slot_bytes) == 0;
    slots_unlock(slots);
    return is_full;
}

/* Map the slots to another buffer, and release the one before. NULL maps them to none. */
static int store_map(Store *self, PyObject *buffer) {
    Py_buffer mapped = {0}, before = self->buffer;
    if (buffer != NULL && PyObject_GetBuffer(buffer, &mapped, PyBUF_WRITABLE))
        return -1;
    slots_lock(self->slots);
    self->slots->memory = mapped.buf;
    self->slots->bytes = (unsigned long long)mapped.len;
    slots_unlock(self->slots);
    self->buffer = mapped;
    PyBuffer_Release(&before);
    return 0;
}

static PyObject *store_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    Store *self = (Store *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    self->slots = slots_new();
    if (self->slots != NULL)
        return (PyObject *)self;
    Py_DECREF((PyObject *)self);
    return PyErr_NoMemory();
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
    if (self->slots != NULL)
        store_map(self, NULL);
    return 0;
}

static void store_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    store_clear((Store *)self);
    slots_release(((Store *)self)->slots);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *store_replace_buffer(Store *self, PyObject *buffer) {
    if (store_map(self, buffer))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *store_close(Store *self, PyObject *Py_UNUSED(ignored)) {
    store_map(self, NULL);
    Py_RETURN_NONE;
}

/* Have disk blocks allocated for an item; -1 with an error. */
static int make_room(Store *self, unsigned long long number) {
    if (self->make_room == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the store is not initialized");
        return -1;
    }
    PyObject *offset = PyObject_CallFunction(self->make_room, "K", number);
    Py_XDECREF(offset); /* which the twin needs */
    return offset == NULL ? -1 : 0;
}

/* -- records --------------------------------------------------------------------------------------------------------- */

static void write_record(unsigned char *slot, const unsigned char *body, uint32_t step, int64_t start_ns,
                         int64_t end_ns, uint32_t uncertainty_ns, unsigned long long sequence) {
    unsigned char record[RECORD_BYTES];
    uint32_t narrow[2] = {step, uncertainty_ns};
    memcpy(record + 4, &start_ns, 8);
    memcpy(record + 12, &end_ns, 8);
    memcpy(record + 20, narrow, 8);
    memcpy(record + 28, body, BODY_BYTES);
    memcpy(record + 56, &sequence, 8);
    uint32_t crc = crc32_of(record + 4, RECORD_BYTES - 4);
    memcpy(record, &crc, 4);
    memcpy(slot, record, RECORD_BYTES);
}

Stored slots_append(Slots *slots, const unsigned char *body, uint32_t step, int64_t start_ns, int64_t end_ns,
                    uint32_t uncertainty_ns) {
    slots_lock(slots);
    Stored stored = CLOSED;
    if (slots->memory != NULL) {
        unsigned long long offset = offset_of(slots, slots->latest + 1, RECORD_BYTES);
        stored = offset == 0 ? NO_ROOM : STORED;
        if (offset)
            write_record(slots->memory + offset, body, step, start_ns, end_ns, uncertainty_ns, ++slots->latest);
    }
    slots_unlock(slots);
    return stored;
}

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
    /* After the end of the recording, training goes on. */
    while (slots_append(self->slots, (unsigned char *)body, (uint32_t)step, start_ns, end_ns,
                        (uint32_t)uncertainty_ns) == NO_ROOM) {
        unsigned long long sequence = self->slots->latest + 1;
        if (make_room(self, sequence))
            return NULL;
        if (is_still_full(self->slots, sequence, RECORD_BYTES)) {
            PyErr_SetString(PyExc_IndexError, "the slot is beyond the end of the log");
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

static PyTypeObject *record_store_type;

Slots *slots_of_record_store(PyObject *store) {
    if (!PyObject_TypeCheck(store, record_store_type)) {
        PyErr_SetString(PyExc_TypeError, "records are stored by a RecordStore of this module");
        return NULL;
    }
    Slots *slots = ((Store *)store)->slots;
    __atomic_add_fetch(&slots->references, 1, __ATOMIC_RELAXED);
    return slots;
}

int make_room_for_starved(PyObject *store) {
    Store *self = (Store *)store;
    __atomic_store_n(&self->slots->is_starved, 0, __ATOMIC_RELAXED);
    return make_room(self, self->slots->latest + 1);
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
    Slots *slots = self->slots;
    unsigned long long number, offset;
    for (;;) {
        slots_lock(slots);
        number = slots->latest + 1;
        offset = offset_of(slots, number, ENTRY_BYTES);
        if (slots->memory == NULL || offset)
            break;
        slots_unlock(slots);
        if (make_room(self, number))
            return NULL;
        if (is_still_full(slots, number, ENTRY_BYTES)) {
            PyErr_SetString(PyExc_IndexError, "the slot is beyond the end of the log");
            return NULL;
        }
    }
    if (slots->memory == NULL) {
        slots_unlock(slots);
        return PyLong_FromLong(0);
    }
    unsigned char *slot = slots->memory + offset;
    slots->latest = number;
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
    slots_unlock(slots);
    return PyLong_FromUnsignedLongLong(number);
}

/* Add a time, that of `launched` or `completed`, and flags. */
static void update_slot(unsigned char *slot, const char *field, int64_t time_ns, uint8_t flags) {
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
}

static PyObject *update(Store *self, PyObject *args) {
    unsigned long long number;
    const char *field;
    long long time_ns;
    unsigned char flags;
    if (!PyArg_ParseTuple(args, "KzLb", &number, &field, &time_ns, &flags))
        return NULL;
    Slots *slots = self->slots;
    slots_lock(slots);
    /* The slot may hold a later entry by now. */
    int is_gone = number == 0 || number > slots->latest || number + slots->capacity <= slots->latest;
    if (!is_gone && slots->memory != NULL)
        update_slot(slots->memory + HEADER_BYTES + (number - 1) % slots->capacity * ENTRY_BYTES, field, time_ns, flags);
    slots_unlock(slots);
    Py_RETURN_NONE;
}

/* Numbers of `Slots`, by their offset. */
static PyObject *get_number(Store *self, void *offset) {
    slots_lock(self->slots);
    unsigned long long number = *(unsigned long long *)((char *)self->slots + (size_t)offset);
    slots_unlock(self->slots);
    return PyLong_FromUnsignedLongLong(number);
}

static int set_number(Store *self, PyObject *value, void *offset) {
    unsigned long long number = value == NULL ? 0 : PyLong_AsUnsignedLongLong(value);
    if (value == NULL || PyErr_Occurred()) {
        if (value == NULL)
            PyErr_SetString(PyExc_AttributeError, "it can't be deleted");
        return -1;
    }
    slots_lock(self->slots);
    *(unsigned long long *)((char *)self->slots + (size_t)offset) = number;
    slots_unlock(self->slots);
    return 0;
}

#define NUMBER(name) {#name, (getter)get_number, (setter)set_number, NULL, (void *)offsetof(Slots, name)}

static PyGetSetDef store_numbers[] = {
    NUMBER(latest), NUMBER(allocated), NUMBER(capacity), NUMBER(pinned), {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef store_members[] = {
    {"hash", T_ULONGLONG, offsetof(Store, hash), READONLY, NULL},
    {"names_hash", T_ULONGLONG, offsetof(Store, names_hash), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

#define STORE_METHODS                                              \
    {"replace_buffer", (PyCFunction)store_replace_buffer, METH_O, NULL}, \
    {"close", (PyCFunction)store_close, METH_NOARGS, NULL}

#define STORE_SLOTS                                                                                           \
    {Py_tp_new, store_new}, {Py_tp_init, store_init}, {Py_tp_traverse, store_traverse},                       \
        {Py_tp_clear, store_clear}, {Py_tp_dealloc, store_dealloc}, {Py_tp_members, store_members},           \
        {Py_tp_getset, store_numbers}

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
    if (record_store_type == NULL) {
        make_crc_table();
        pthread_atfork(NULL, NULL, count_fork);
    }
    PyObject *type = PyType_FromModuleAndSpec(module, &record_store_spec, NULL);
    if (type == NULL || PyModule_AddType(module, (PyTypeObject *)type))
        return -1;
    record_store_type = (PyTypeObject *)type; /* for good */
    return add_type(module, &entry_store_spec);
}
