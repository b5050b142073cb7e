/* What the files of the module share. */

#ifndef OVERLAPSCOPE_NATIVE_H
#define OVERLAPSCOPE_NATIVE_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#define TYPE_FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC)

static inline int64_t host_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Deallocate an object that its type's tp_clear leaves without anything to free. */
static inline void dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    ((inquiry)PyType_GetSlot(type, Py_tp_clear))(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static inline int add_type(PyObject *module, PyType_Spec *spec) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    int failed = type == NULL || PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

/* A mapped ring of slots. Apart from the object that owns it, because a thread may store records that holds no reference
 * to objects of Python, nor the interpreter lock. Everything below `lock` is accessed while it is held, for which
 * nothing of Python may be called. */
typedef struct {
    int references;
    unsigned generation;
    pthread_mutex_t lock;
    unsigned char *memory; /* NULL once closed */
    unsigned long long bytes, latest, allocated, capacity, pinned;
    int is_starved; /* a record of such a thread waits for disk blocks */
} Slots;

enum { BODY_BYTES = 28 };
typedef enum { STORED, CLOSED, NO_ROOM } Stored;

/* Number of forks between the first process of the module and this one. What was made before the latest fork has locks
 * that nobody may ever release, and threads that do not exist. */
extern unsigned fork_generation;

/* Store a record, on any thread. */
Stored slots_append(Slots *slots, const unsigned char *body, uint32_t step, int64_t start_ns, int64_t end_ns,
                    uint32_t uncertainty_ns);

/* Return the slots of a record store with a new reference; NULL with an error if the object is none. */
Slots *slots_of_record_store(PyObject *store);
void slots_release(Slots *slots);

/* Let a store allocate disk blocks that a record waits for; -1 with an error. */
int make_room_for_starved(PyObject *store);

/* Each adds the types of its file to the module; -1 with an error. */
int add_stores(PyObject *module);
int add_countdown(PyObject *module);
int add_events(PyObject *module);
int add_finite(PyObject *module);
int add_marks(PyObject *module);

#endif
