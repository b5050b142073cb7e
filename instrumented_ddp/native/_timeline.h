/* The time line of a device: marks whose times are not known yet, and records that wait for them. */

#ifndef OVERLAPSCOPE_TIMELINE_H
#define OVERLAPSCOPE_TIMELINE_H

#include "_driver.h"

/* A mark, which is shared by the object in Python, the list of the marks and the records that need it. */
typedef struct Mark {
    int references;
    int is_known; /* written last, and read first */
    int64_t time_ns;
    void *event, *stream;
    struct Mark *next;
} Mark;

typedef struct Record {
    Mark *start, *end;
    uint32_t step;
    unsigned char body[BODY_BYTES];
    struct Record *next;
} Record;

typedef struct {
    void *event;
    int64_t recorded_ns, seen_ns, time_ns;
} Anchor;

/* Lists of which the first part belongs to whoever holds `polling`, and `new_` to whoever holds `lock`. */
typedef struct {
    int references;
    unsigned generation;
    Driver driver;
    int device;
    void *context, *anchor_stream;
    Slots *slots;
    pthread_mutex_t polling, lock;
    pthread_cond_t changed;
    Mark *marks, *new_marks, **new_marks_end;
    Record *records, *new_records, **new_records_end;
    void **pool;
    size_t pool_count, pool_room;
    Anchor anchor, next_anchor; /* without event: there is none under way */
    int failure;                /* code of the driver; 0 while it works */
    int is_idle, is_stopping, has_thread, is_over;
} Timeline;

/* Return a new time line with one reference; NULL without memory. It takes over the reference to the slots. */
Timeline *timeline_new(const Driver *driver, Slots *slots, void *anchor_stream);

/* Create the first events and anchors, which waits for the device. Return a code of the driver. */
int timeline_begin(Timeline *timeline, int device_index);

void timeline_release(Timeline *timeline);
void mark_release(Mark *mark);

/* Return whether the time line is of another process, from which this one was forked. */
static inline int timeline_is_foreign(const Timeline *timeline) { return timeline->generation != fork_generation; }

/* Record an event on a stream, and return its mark with a reference for the caller; NULL with a code, or 0 in a capture. */
Mark *timeline_mark(Timeline *timeline, void *stream, int *code);

/* Queue a record, with references of its own; -1 without memory. */
int timeline_write(Timeline *timeline, const unsigned char *body, uint32_t step, Mark *start, Mark *end);

/* Time what the device has passed, write the records that are complete, and renew the anchor if it is old. Return whether
 * anything has become known. Never waits for the device, except for a new anchor, for about 50 us. */
int timeline_poll(Timeline *timeline);

/* Start the thread that polls; return an error number. Stop it, waiting a second for its last poll at most. */
int timeline_start(Timeline *timeline);
void timeline_stop(Timeline *timeline);

/* Stop the thread without waiting for it; it keeps the time line for as long as it lasts. */
void timeline_abandon(Timeline *timeline);

#endif
