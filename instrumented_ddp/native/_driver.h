/* The table of a driver's functions. `_driver.c` has their names. */

#ifndef OVERLAPSCOPE_DRIVER_H
#define OVERLAPSCOPE_DRIVER_H

#include "_native.h"

#include <stdio.h>

/* Of cuda.h; HIP has the same numbers. */
enum { NOT_READY = 600, CAPTURE_IMPLICIT = 906, CAPTURE_MODE_THREAD_LOCAL = 1, DISABLE_TIMING = 2 };

typedef struct {
    int (*device_get)(int *device, int index);
    int (*context_retain)(void **context, int device);
    int (*context_release)(int device);
    int (*context_current)(void **context);
    int (*context_push)(void *context);
    int (*context_pop)(void **context);
    int (*event_create)(void **event, unsigned flags);
    int (*event_destroy)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*event_synchronize)(void *event);
    int (*event_elapsed)(float *ms, void *start, void *end);
    int (*stream_wait_event)(void *stream, void *event, unsigned flags);
    int (*stream_is_capturing)(void *stream, int *status);
    int (*exchange_capture_mode)(int *mode);
    int (*error_name)(int code, const char **name);
    int64_t (*now_ns)(void);
} Driver;

/* Fill the table from a library. Return NULL, or why it can't be used: a message, or the name of what it lacks. */
const char *driver_load(Driver *driver, const char *path);

void driver_describe_error(const Driver *driver, int code, char *text, size_t size);

/* Set an error of Python. */
void driver_raise(const Driver *driver, int code);

/* Return whether a stream is captured into a graph instead of being executed; 0 with a code. */
int driver_is_capturing(const Driver *driver, void *stream, int *code);

/* Return the pointer of a stream of torch, or that which a new reference holds. NULL is one too, so look for an error. */
void *pointer_of_stream(PyObject *stream);
void *take_pointer(PyObject *pointer);

/* Make a context current on this thread unless it is, and undo that. Torch keeps that of a device current on the threads
 * that compute on it, but a module may span several. */
int driver_enter(const Driver *driver, void *context, int *is_pushed);
void driver_leave(const Driver *driver, int is_pushed);

#endif
