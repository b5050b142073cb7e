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
    int (*stream_is_capturing)(void *stream, int *status);
    int (*exchange_capture_mode)(int *mode);
    int (*error_name)(int code, const char **name);
    int64_t (*now_ns)(void);
} Driver;

/* Fill the table from a library. Return NULL, or why it can't be used: a message, or the name of what it lacks. */
const char *driver_load(Driver *driver, const char *path);

void driver_describe_error(const Driver *driver, int code, char *text, size_t size);

/* Make a context current on this thread unless it is, and undo that. Torch keeps that of a device current on the threads
 * that compute on it, but a module may span several. */
int driver_enter(const Driver *driver, void *context, int *is_pushed);
void driver_leave(const Driver *driver, int is_pushed);

#endif
