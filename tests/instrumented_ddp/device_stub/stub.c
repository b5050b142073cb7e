/* A driver of CUDA without a device: streams are times, and the host's clock stands still until a test moves it.
 *
 * A stream is the host time at which all that it was given so far is done. An event happens at that time, and has a time of
 * the device's own clock, which drifts. What CUDA forbids is an error here too, and is counted: queries that invalidate a
 * capture, events of another context, times of events that have not happened. With -DHIP it has the names of HIP.
 */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#ifdef HIP
#define NAME(cuda, hip) hip
#else
#define NAME(cuda, hip) cuda
#endif

enum { OK = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600, CAPTURE_UNSUPPORTED = 900 };
enum { MODE_GLOBAL, MODE_THREAD_LOCAL, MODE_RELAXED };
enum { DEVICES = 2, STREAMS = 64, DELAYS = 64, EPOCH_NS = 123456789 };

typedef struct {
    int device, is_capturing;
    int64_t done_ns, lag_ns, delays_ns[DELAYS];
    int delay_count, delay_at;
} Stream;

typedef struct {
    int device, is_recorded, is_captured, has_time;
    int64_t happens_ns;
} Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Stream streams[STREAMS];
static int stream_count, failure, capture_mode, contexts[DEVICES], retained[DEVICES];
static pthread_t capturing_thread;
static volatile int is_hanging;
static int64_t host_ns, query_ns, drift_ppm;
static int64_t created, alive, recorded, queries, violations;
static __thread int thread_mode, depth;
static __thread void *context_stack[8];

static int locked(int code) {
    pthread_mutex_unlock(&lock);
    return code;
}

static int device_of(const void *context) { return (int)((const int *)context - contexts); }
static void *current(void) { return depth ? context_stack[depth - 1] : NULL; }
static int64_t device_ns(int64_t ns) { return ns + ns * drift_ppm / 1000000 + EPOCH_NS; }

/* The default stream of a device has no pointer; here it is one of the first. */
static Stream *stream_of(void *pointer) { return pointer ? pointer : &streams[device_of(current())]; }

static int forbids_queries(void) {
    int is_own = 0, is_any = 0;
    for (int at = 0; at < stream_count; at++)
        is_any |= streams[at].is_capturing;
    is_own = is_any && pthread_equal(pthread_self(), capturing_thread) && capture_mode != MODE_RELAXED;
    return (is_own && thread_mode != MODE_RELAXED) || (is_any && capture_mode == MODE_GLOBAL && thread_mode == MODE_GLOBAL);
}

/* -- the driver ------------------------------------------------------------------------------------------------------ */

int NAME(cuDeviceGet, hipDeviceGet)(int *device, int index) {
    *device = index;
    return index < 0 || index >= DEVICES ? 101 : failure;
}

int NAME(cuDevicePrimaryCtxRetain, hipDevicePrimaryCtxRetain)(void **context, int device) {
    retained[device]++;
    *context = &contexts[device];
    return failure;
}

int NAME(cuDevicePrimaryCtxRelease_v2, hipDevicePrimaryCtxRelease)(int device) {
    retained[device]--;
    return OK;
}

int NAME(cuCtxGetCurrent, hipCtxGetCurrent)(void **context) {
    *context = current();
    return OK;
}

int NAME(cuCtxPushCurrent_v2, hipCtxPushCurrent)(void *context) {
    context_stack[depth++] = context;
    return OK;
}

int NAME(cuCtxPopCurrent_v2, hipCtxPopCurrent)(void **context) {
    *context = context_stack[--depth];
    return OK;
}

int NAME(cuEventCreate, hipEventCreateWithFlags)(void **event, unsigned flags) {
    if (failure || !current())
        return failure ? failure : INVALID_VALUE;
    Event *made = calloc(1, sizeof *made);
    made->device = device_of(current());
    made->has_time = !(flags & 2);
    pthread_mutex_lock(&lock);
    created++;
    alive++;
    *event = made;
    return locked(OK);
}

int NAME(cuEventDestroy_v2, hipEventDestroy)(void *event) {
    pthread_mutex_lock(&lock);
    alive--;
    free(event);
    return locked(OK);
}

int NAME(cuEventRecord, hipEventRecord)(void *pointer, void *stream_pointer) {
    Event *event = pointer;
    pthread_mutex_lock(&lock);
    if (failure)
        return locked(failure);
    if (!current() || event->device != device_of(current()) || stream_of(stream_pointer)->device != event->device)
        return locked((violations++, INVALID_HANDLE));
    Stream *stream = stream_of(stream_pointer);
    int64_t lag_ns = stream->delay_at < stream->delay_count ? stream->delays_ns[stream->delay_at++] : stream->lag_ns;
    int64_t earliest_ns = host_ns + lag_ns;
    event->happens_ns = stream->done_ns > earliest_ns ? stream->done_ns : earliest_ns;
    event->is_recorded = 1;
    event->is_captured = stream->is_capturing;
    recorded++;
    return locked(OK);
}

int NAME(cuEventQuery, hipEventQuery)(void *pointer) {
    Event *event = pointer;
    while (is_hanging)
        usleep(1000);
    pthread_mutex_lock(&lock);
    queries++;
    if (failure)
        return locked(failure);
    if (!current())
        return locked((violations++, INVALID_CONTEXT));
    if (event->is_captured || forbids_queries())
        return locked((violations++, CAPTURE_UNSUPPORTED));
    host_ns += query_ns;
    return locked(host_ns >= event->happens_ns ? OK : NOT_READY);
}

int NAME(cuEventSynchronize, hipEventSynchronize)(void *pointer) {
    Event *event = pointer;
    pthread_mutex_lock(&lock);
    if (host_ns < event->happens_ns)
        host_ns = event->happens_ns;
    return locked(failure);
}

int NAME(cuEventElapsedTime, hipEventElapsedTime)(float *ms, void *start, void *end) {
    Event *from = start, *to = end;
    pthread_mutex_lock(&lock);
    if (failure)
        return locked(failure);
    if (!from->is_recorded || !to->is_recorded || !from->has_time || !to->has_time || from->device != to->device)
        return locked((violations++, INVALID_HANDLE));
    if (host_ns < from->happens_ns || host_ns < to->happens_ns)
        return locked((violations++, NOT_READY));
    *ms = (float)((double)(device_ns(to->happens_ns) - device_ns(from->happens_ns)) / 1e6);
    return locked(OK);
}

int NAME(cuStreamIsCapturing, hipStreamIsCapturing)(void *stream, int *status) {
    *status = stream_of(stream)->is_capturing;
    return failure;
}

int NAME(cuStreamWaitEvent, hipStreamWaitEvent)(void *stream_pointer, void *pointer, unsigned flags) {
    Event *event = pointer;
    Stream *stream = stream_of(stream_pointer);
    pthread_mutex_lock(&lock);
    if (failure || flags)
        return locked(failure ? failure : INVALID_VALUE);
    if (stream->done_ns < event->happens_ns)
        stream->done_ns = event->happens_ns;
    stream->is_capturing |= event->is_captured;
    return locked(OK);
}

int NAME(cuThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode)(int *mode) {
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return OK;
}

int NAME(cuGetErrorName, hipDrvGetErrorName)(int code, const char **name) {
    *name = code == 710 ? "CUDA_ERROR_ASSERT" : NULL;
    return *name ? OK : INVALID_VALUE;
}

int64_t stubHostNowNs(void) {
    int64_t ns;
    pthread_mutex_lock(&lock);
    ns = host_ns;
    return pthread_mutex_unlock(&lock), ns;
}

/* -- what a test does ------------------------------------------------------------------------------------------------ */

void stub_reset(void) {
    pthread_mutex_lock(&lock);
    stream_count = DEVICES;
    for (int at = 0; at < DEVICES; at++) {
        streams[at] = (Stream){.device = at};
        retained[at] = 0;
    }
    failure = depth = is_hanging = 0;
    host_ns = 1000000000;
    query_ns = drift_ppm = created = alive = recorded = queries = violations = 0;
    locked(0);
}

void *stub_stream(int device) {
    Stream *stream = &streams[stream_count++];
    *stream = (Stream){.device = device};
    return stream;
}

int stub_enter(int device) { return context_stack[depth++] = &contexts[device], OK; }
void stub_leave(void) { depth--; }
void stub_advance(int64_t ns) { pthread_mutex_lock(&lock), host_ns += ns, locked(0); }
void stub_lag(void *stream, int64_t ns) { stream_of(stream)->lag_ns = ns; }
int64_t stub_done_ns(void *stream) { return stream_of(stream)->done_ns; }
void stub_fail(int code) { failure = code; }
void stub_hang(int hangs) { is_hanging = hangs; }
void stub_drift(int64_t ppm) { drift_ppm = ppm; }
void stub_query_takes(int64_t ns) { query_ns = ns; }

/* Events that are recorded next on a stream happen after these delays, one after the other. */
void stub_delay(void *pointer, int64_t ns) {
    Stream *stream = stream_of(pointer);
    stream->delays_ns[stream->delay_count++] = ns;
}

/* Give a stream work of some duration. */
void stub_enqueue(void *pointer, int64_t ns) {
    Stream *stream = stream_of(pointer);
    pthread_mutex_lock(&lock);
    stream->done_ns = (stream->done_ns > host_ns ? stream->done_ns : host_ns) + ns;
    locked(0);
}

void stub_begin_capture(void *stream, int mode) {
    stream_of(stream)->is_capturing = 1;
    capture_mode = mode;
    capturing_thread = pthread_self();
}

void stub_end_capture(void) {
    for (int at = 0; at < stream_count; at++)
        streams[at].is_capturing = 0;
}

int64_t stub_count(int what) {
    int64_t counts[] = {created, alive, recorded, queries, violations, retained[0], depth};
    return counts[what];
}
