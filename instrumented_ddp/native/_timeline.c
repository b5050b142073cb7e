/* Marks of a device: events, their times on the host's clock, and the thread that finds these out.
 *
 * `instrumented_ddp.recording.timing.CudaTimer` is the twin, and says why there are anchors. Here the thread makes them, so
 * that a training thread only records events. Nothing of Python is called in this file.
 */

#include "_timeline.h"

#include <signal.h>

enum {
    FIRST_EVENTS = 64,
    FIRST_ANCHORS = 10, /* the very first is slow, and others may have the device */
    ANCHOR_POLLS = 30,  /* 50 us at most where no stream overtakes another */
    MAX_BLOCKED = 16,
    MS = 1000000,
};
/* An event that is timed at 0.1 s from its anchor is exact to 4 ns, and at 4 s, when nothing was marked, to 0.1 us. */
static const int64_t ANCHOR_PERIOD_NS = 100 * MS, SHORTEST_PAUSE_NS = 20 * MS, LONGEST_PAUSE_NS = 50 * MS,
                     IDLE_PAUSE_NS = 4000LL * MS, STOP_NS = 1000LL * MS;

Timeline *timeline_new(const Driver *driver, Slots *slots, void *anchor_stream) {
    Timeline *self = calloc(1, sizeof *self);
    if (self == NULL)
        return NULL;
    self->references = 1;
    self->generation = fork_generation;
    self->driver = *driver;
    self->slots = slots;
    self->anchor_stream = anchor_stream;
    self->new_marks_end = &self->new_marks;
    self->new_records_end = &self->new_records;
    pthread_mutex_init(&self->polling, NULL);
    pthread_mutex_init(&self->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&self->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return self;
}

void mark_release(Mark *mark) {
    if (mark != NULL && __atomic_sub_fetch(&mark->references, 1, __ATOMIC_ACQ_REL) == 0)
        free(mark);
}

static Mark *mark_share(Mark *mark) {
    __atomic_add_fetch(&mark->references, 1, __ATOMIC_RELAXED);
    return mark;
}

static int is_known(const Mark *mark) { return __atomic_load_n(&mark->is_known, __ATOMIC_ACQUIRE); }

static void record_free(Record *record) {
    mark_release(record->start);
    mark_release(record->end);
    free(record);
}

/* -- events ---------------------------------------------------------------------------------------------------------- */

static void *take_event(Timeline *self, int *code) {
    void *event = NULL;
    pthread_mutex_lock(&self->lock);
    if (self->pool_count)
        event = self->pool[--self->pool_count];
    pthread_mutex_unlock(&self->lock);
    if (event == NULL)
        *code = self->driver.event_create(&event, 0);
    return event;
}

static void give_event(Timeline *self, void *event) {
    pthread_mutex_lock(&self->lock);
    if (self->pool_count == self->pool_room) {
        size_t room = self->pool_room ? 2 * self->pool_room : FIRST_EVENTS;
        void **pool = realloc(self->pool, room * sizeof *pool);
        if (pool != NULL) {
            self->pool = pool;
            self->pool_room = room;
        }
    }
    int is_kept = self->pool_count < self->pool_room;
    if (is_kept)
        self->pool[self->pool_count++] = event;
    pthread_mutex_unlock(&self->lock);
    if (!is_kept)
        self->driver.event_destroy(event);
}

static void destroy_events(Timeline *self) {
    Driver *driver = &self->driver;
    int is_pushed;
    if (self->context == NULL || driver_enter(driver, self->context, &is_pushed))
        return;
    for (Mark *mark = self->marks; mark != NULL; mark = mark->next)
        driver->event_destroy(mark->event);
    for (size_t at = 0; at < self->pool_count; at++)
        driver->event_destroy(self->pool[at]);
    if (self->anchor.event != NULL)
        driver->event_destroy(self->anchor.event);
    if (self->next_anchor.event != NULL)
        driver->event_destroy(self->next_anchor.event);
    driver_leave(driver, is_pushed);
    driver->context_release(self->device);
}

static void take_new(Timeline *self) {
    Mark **marks = &self->marks;
    Record **records = &self->records;
    while (*marks != NULL)
        marks = &(*marks)->next;
    while (*records != NULL)
        records = &(*records)->next;
    pthread_mutex_lock(&self->lock);
    *marks = self->new_marks;
    *records = self->new_records;
    self->new_marks = NULL;
    self->new_records = NULL;
    self->new_marks_end = &self->new_marks;
    self->new_records_end = &self->new_records;
    pthread_mutex_unlock(&self->lock);
}

void timeline_release(Timeline *self) {
    if (self == NULL || __atomic_sub_fetch(&self->references, 1, __ATOMIC_ACQ_REL) || timeline_is_foreign(self))
        return; /* in a new process the device is not ours, and locks may be held for ever */
    take_new(self);
    if (self->failure == 0)
        destroy_events(self);
    for (Mark *mark = self->marks, *next; mark != NULL; mark = next) {
        next = mark->next;
        mark_release(mark);
    }
    for (Record *record = self->records, *next; record != NULL; record = next) {
        next = record->next;
        record_free(record);
    }
    slots_release(self->slots);
    pthread_cond_destroy(&self->changed);
    pthread_mutex_destroy(&self->lock);
    pthread_mutex_destroy(&self->polling);
    free(self->pool);
    free(self);
}

/* -- anchors --------------------------------------------------------------------------------------------------------- */

/* Make an anchor that the host waits for; its error is at most half of the wait. */
static int make_synchronized_anchor(Timeline *self, Anchor *anchor) {
    int code = 0;
    anchor->event = take_event(self, &code);
    if (anchor->event == NULL)
        return code;
    anchor->recorded_ns = self->driver.now_ns();
    code = self->driver.event_record(anchor->event, self->anchor_stream);
    if (code == 0)
        code = self->driver.event_synchronize(anchor->event);
    anchor->seen_ns = self->driver.now_ns();
    anchor->time_ns = anchor->recorded_ns + (anchor->seen_ns - anchor->recorded_ns) / 2;
    return code;
}

static int begin_in_context(Timeline *self) {
    int code = 0;
    for (int count = 0; count < FIRST_EVENTS; count++) {
        void *event = NULL;
        if ((code = self->driver.event_create(&event, 0)))
            return code;
        give_event(self, event);
    }
    for (int count = 0; count < FIRST_ANCHORS && code == 0; count++) {
        Anchor anchor = {0};
        code = make_synchronized_anchor(self, &anchor);
        Anchor *worse = &anchor;
        if (self->anchor.event == NULL ||
            anchor.seen_ns - anchor.recorded_ns < self->anchor.seen_ns - self->anchor.recorded_ns) {
            Anchor before = self->anchor;
            self->anchor = anchor;
            anchor = before;
        }
        if (worse->event != NULL)
            give_event(self, worse->event);
    }
    return code;
}

int timeline_begin(Timeline *self, int device_index) {
    int is_pushed, code = self->driver.device_get(&self->device, device_index);
    if (code || (code = self->driver.context_retain(&self->context, self->device)) ||
        (code = driver_enter(&self->driver, self->context, &is_pushed)))
        return code;
    code = begin_in_context(self);
    driver_leave(&self->driver, is_pushed);
    return code;
}

/* Query an anchor until it has completed. Return a code. */
static int look_at(Timeline *self, Anchor *anchor) {
    int code = self->driver.event_query(anchor->event);
    if (code == 0)
        anchor->seen_ns = self->driver.now_ns();
    return code == NOT_READY ? 0 : code;
}

/* Begin an anchor if the one in use is old, and look whether the one that has begun is complete. */
static int advance_anchor(Timeline *self) {
    Anchor *next = &self->next_anchor;
    int code = 0;
    if (next->event != NULL)
        return look_at(self, next);
    if (self->driver.now_ns() - self->anchor.seen_ns < ANCHOR_PERIOD_NS)
        return 0;
    void *event = take_event(self, &code);
    if (event == NULL)
        return code;
    *next = (Anchor){.event = event, .recorded_ns = self->driver.now_ns()};
    code = self->driver.event_record(event, self->anchor_stream);
    for (int poll = 0; poll < ANCHOR_POLLS && code == 0 && next->seen_ns == 0; poll++)
        code = look_at(self, next);
    return code;
}

/* Time an event against the anchor in use. */
static int time_event(Timeline *self, void *event, int64_t *time_ns) {
    float ms = 0;
    int code = self->driver.event_elapsed(&ms, self->anchor.event, event);
    *time_ns = self->anchor.time_ns + (int64_t)((double)ms * MS + (ms < 0 ? -0.5 : 0.5));
    return code;
}

/* Use the next anchor from now on, if it is complete: by its distance from the last one, as far as causality allows. */
static int adopt_anchor(Timeline *self) {
    Anchor *next = &self->next_anchor;
    if (next->event == NULL || next->seen_ns == 0)
        return 0;
    int code = time_event(self, next->event, &next->time_ns);
    if (code)
        return code;
    if (next->time_ns < next->recorded_ns)
        next->time_ns = next->recorded_ns;
    if (next->time_ns > next->seen_ns)
        next->time_ns = next->seen_ns;
    give_event(self, self->anchor.event);
    self->anchor = *next;
    *next = (Anchor){0};
    return 0;
}

/* -- polling --------------------------------------------------------------------------------------------------------- */

/* Time all marks that the device has passed. On each stream these are the first ones, so a stream is asked no further than
 * its first mark that has not been passed; what hangs on one stream holds up nothing on another. */
static int time_marks(Timeline *self, int *has_progress) {
    void *blocked[MAX_BLOCKED];
    int blocked_count = 0, code = 0;
    for (Mark **at = &self->marks; *at != NULL && code == 0;) {
        Mark *mark = *at;
        int is_blocked = 0;
        for (int number = 0; number < blocked_count; number++)
            is_blocked |= blocked[number] == mark->stream;
        int is_wanted = __atomic_load_n(&mark->references, __ATOMIC_ACQUIRE) > 1;
        if (is_wanted && !is_blocked) {
            code = self->driver.event_query(mark->event);
            is_blocked = code != 0;
            if (code == NOT_READY) {
                code = 0;
                if (blocked_count < MAX_BLOCKED)
                    blocked[blocked_count++] = mark->stream;
            }
        }
        if (is_wanted && is_blocked) {
            at = &mark->next;
            continue;
        }
        if (is_wanted && (code = time_event(self, mark->event, &mark->time_ns)))
            break;
        __atomic_store_n(&mark->is_known, 1, __ATOMIC_RELEASE);
        give_event(self, mark->event);
        *at = mark->next;
        mark_release(mark);
        *has_progress = 1;
    }
    return code;
}

static void write_records(Timeline *self) {
    for (Record **at = &self->records; *at != NULL;) {
        Record *record = *at;
        if (!is_known(record->start) || !is_known(record->end)) {
            at = &record->next;
            continue;
        }
        if (slots_append(self->slots, record->body, record->step, record->start->time_ns, record->end->time_ns, 0) ==
            NO_ROOM) {
            __atomic_store_n(&self->slots->is_starved, 1, __ATOMIC_RELAXED);
            return;
        }
        *at = record->next;
        record_free(record);
    }
}

static void fail(Timeline *self, int code) {
    pthread_mutex_lock(&self->lock);
    if (self->failure == 0)
        __atomic_store_n(&self->failure, code, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&self->lock);
}

static int poll_device(Timeline *self) {
    int has_progress = 0, code = advance_anchor(self);
    if (code == 0)
        code = time_marks(self, &has_progress);
    if (code == 0)
        code = adopt_anchor(self);
    if (code)
        fail(self, code);
    return has_progress;
}

int timeline_poll(Timeline *self) {
    int has_progress = 0, is_pushed = 0, mode = CAPTURE_MODE_THREAD_LOCAL, code;
    pthread_mutex_lock(&self->polling);
    take_new(self);
    if (__atomic_load_n(&self->failure, __ATOMIC_ACQUIRE) == 0) {
        /* A capture in the global mode, which is the default, forbids queries to all threads in that mode, and is
         * invalidated by them. NCCL's own watchdog does the same. */
        code = driver_enter(&self->driver, self->context, &is_pushed);
        if (code == 0 && (code = self->driver.exchange_capture_mode(&mode)) == 0) {
            has_progress = poll_device(self);
            self->driver.exchange_capture_mode(&mode);
        }
        if (code)
            fail(self, code);
        driver_leave(&self->driver, is_pushed);
    }
    write_records(self);
    pthread_mutex_unlock(&self->polling);
    return has_progress;
}

/* -- marks ----------------------------------------------------------------------------------------------------------- */

/* Wake the thread if it waits for a change, with the lock held. Waking it for each would cost more than all else. */
static void wake(Timeline *self) {
    if (self->is_idle) {
        self->is_idle = 0;
        pthread_cond_signal(&self->changed);
    }
}

static Mark *record_mark(Timeline *self, void *stream, int *code) {
    if (driver_is_capturing(&self->driver, stream, code) || *code)
        return NULL;
    Mark *mark = calloc(1, sizeof *mark);
    void *event = mark == NULL ? NULL : take_event(self, code);
    if (event == NULL) {
        free(mark);
        return NULL;
    }
    *code = self->driver.event_record(event, stream);
    if (*code) {
        give_event(self, event);
        free(mark);
        return NULL;
    }
    *mark = (Mark){.references = 2, .event = event, .stream = stream};
    pthread_mutex_lock(&self->lock);
    *self->new_marks_end = mark;
    self->new_marks_end = &mark->next;
    wake(self);
    pthread_mutex_unlock(&self->lock);
    return mark;
}

Mark *timeline_mark(Timeline *self, void *stream, int *code) {
    int is_pushed;
    Mark *mark = NULL;
    *code = driver_enter(&self->driver, self->context, &is_pushed);
    if (*code == 0) {
        mark = record_mark(self, stream, code);
        driver_leave(&self->driver, is_pushed);
    }
    if (*code)
        fail(self, *code);
    return mark;
}

int timeline_write(Timeline *self, const unsigned char *body, uint32_t step, Mark *start, Mark *end) {
    Record *record = malloc(sizeof *record);
    if (record == NULL)
        return -1;
    *record = (Record){.start = mark_share(start), .end = mark_share(end), .step = step};
    memcpy(record->body, body, BODY_BYTES);
    pthread_mutex_lock(&self->lock);
    *self->new_records_end = record;
    self->new_records_end = &record->next;
    wake(self);
    pthread_mutex_unlock(&self->lock);
    return 0;
}

/* -- the thread ------------------------------------------------------------------------------------------------------ */

/* Wait, with the lock held, until the time line changes or a time has passed. */
static void wait_for_change(Timeline *self, int64_t wait_ns) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    int64_t ns = until.tv_nsec + wait_ns;
    until.tv_sec += ns / (1000 * MS);
    until.tv_nsec = ns % (1000 * MS);
    pthread_cond_timedwait(&self->changed, &self->lock, &until);
}

static void *run(void *argument) {
    Timeline *self = argument;
    int64_t pause_ns = SHORTEST_PAUSE_NS;
    int is_pushed = 0;
    driver_enter(&self->driver, self->context, &is_pushed); /* if that fails, so does the first poll, and says so */
    pthread_mutex_lock(&self->lock);
    while (!self->is_stopping) {
        self->is_idle = self->marks == NULL && self->new_marks == NULL && self->new_records == NULL;
        int was_idle = self->is_idle;
        wait_for_change(self, was_idle ? IDLE_PAUSE_NS : pause_ns);
        if (self->is_stopping || (was_idle && !self->is_idle)) { /* the device has hardly begun with the first mark */
            pause_ns = SHORTEST_PAUSE_NS;
            continue;
        }
        self->is_idle = 0;
        pthread_mutex_unlock(&self->lock);
        int has_progress = timeline_poll(self);
        pthread_mutex_lock(&self->lock);
        pause_ns = has_progress ? SHORTEST_PAUSE_NS : pause_ns + pause_ns / 2;
        if (pause_ns > LONGEST_PAUSE_NS)
            pause_ns = LONGEST_PAUSE_NS;
    }
    pthread_mutex_unlock(&self->lock);
    timeline_poll(self);
    driver_leave(&self->driver, is_pushed);
    pthread_mutex_lock(&self->lock);
    self->is_over = 1;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->lock);
    timeline_release(self);
    return NULL;
}

int timeline_start(Timeline *self) {
    pthread_t thread;
    pthread_attr_t detached;
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    __atomic_add_fetch(&self->references, 1, __ATOMIC_RELAXED);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of Python */
    int error = pthread_create(&thread, &detached, run, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
    if (error)
        __atomic_sub_fetch(&self->references, 1, __ATOMIC_RELAXED);
    else
        self->has_thread = 1;
    return error;
}

void timeline_abandon(Timeline *self) {
    if (timeline_is_foreign(self))
        return;
    pthread_mutex_lock(&self->lock);
    self->is_stopping = 1;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->lock);
}

void timeline_stop(Timeline *self) {
    timeline_abandon(self);
    pthread_mutex_lock(&self->lock);
    int64_t deadline_ns = host_now_ns() + STOP_NS;
    while (self->has_thread && !self->is_over && host_now_ns() < deadline_ns)
        wait_for_change(self, deadline_ns - host_now_ns());
    pthread_mutex_unlock(&self->lock);
    if (!self->has_thread)
        timeline_poll(self);
}
