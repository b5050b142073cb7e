/* The functions of a device's driver that marks need, looked up when the first timer is made. Nothing links against
 * CUDA. */

#include "_driver.h"

#include <dlfcn.h>

typedef struct {
    const char *cuda, *hip;
    size_t offset;
} Name;

#define NAME(field, cuda, hip) {cuda, hip, offsetof(Driver, field)}

static const Name required[] = {
    NAME(device_get, "cuDeviceGet", "hipDeviceGet"),
    NAME(context_retain, "cuDevicePrimaryCtxRetain", "hipDevicePrimaryCtxRetain"),
    NAME(context_release, "cuDevicePrimaryCtxRelease_v2", "hipDevicePrimaryCtxRelease"),
    NAME(context_current, "cuCtxGetCurrent", "hipCtxGetCurrent"),
    NAME(context_push, "cuCtxPushCurrent_v2", "hipCtxPushCurrent"),
    NAME(context_pop, "cuCtxPopCurrent_v2", "hipCtxPopCurrent"),
    NAME(event_create, "cuEventCreate", "hipEventCreateWithFlags"),
    NAME(event_destroy, "cuEventDestroy_v2", "hipEventDestroy"),
    NAME(event_record, "cuEventRecord", "hipEventRecord"),
    NAME(event_query, "cuEventQuery", "hipEventQuery"),
    NAME(event_synchronize, "cuEventSynchronize", "hipEventSynchronize"),
    NAME(event_elapsed, "cuEventElapsedTime", "hipEventElapsedTime"),
    NAME(stream_wait_event, "cuStreamWaitEvent", "hipStreamWaitEvent"),
    NAME(stream_is_capturing, "cuStreamIsCapturing", "hipStreamIsCapturing"),
    NAME(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"),
};

static const Name optional[] = {
    NAME(error_name, "cuGetErrorName", "hipDrvGetErrorName"),
    NAME(now_ns, "stubHostNowNs", "stubHostNowNs"), /* a stub's clock of the host, which stands still or jumps */
};

static void *look_up(void *library, const Name *name, int is_hip) {
    return dlsym(library, is_hip ? name->hip : name->cuda);
}

const char *driver_load(Driver *driver, const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* and never closed */
    if (library == NULL)
        return dlerror();
    int is_hip = dlsym(library, "hipEventRecord") != NULL;
    driver->now_ns = host_now_ns;
    for (size_t at = 0; at < sizeof required / sizeof *required; at++) {
        void *function = look_up(library, &required[at], is_hip);
        if (function == NULL)
            return is_hip ? required[at].hip : required[at].cuda;
        memcpy((char *)driver + required[at].offset, &function, sizeof function);
    }
    for (size_t at = 0; at < sizeof optional / sizeof *optional; at++) {
        void *function = look_up(library, &optional[at], is_hip);
        if (function != NULL)
            memcpy((char *)driver + optional[at].offset, &function, sizeof function);
    }
    return NULL;
}

void driver_describe_error(const Driver *driver, int code, char *text, size_t size) {
    const char *name = NULL;
    if (driver->error_name != NULL && driver->error_name(code, &name) == 0 && name != NULL)
        snprintf(text, size, "%s", name);
    else
        snprintf(text, size, "error %d of its driver", code);
}

void driver_raise(const Driver *driver, int code) {
    char text[128];
    driver_describe_error(driver, code, text, sizeof text);
    PyErr_Format(PyExc_RuntimeError, "the device's driver has failed: %s", text);
}

int driver_is_capturing(const Driver *driver, void *stream, int *code) {
    int status = 0;
    *code = driver->stream_is_capturing(stream, &status);
    if (*code == CAPTURE_IMPLICIT) { /* the default stream, while one is captured that waits for it */
        *code = 0;
        return 1;
    }
    return *code == 0 && status != 0;
}

void *take_pointer(PyObject *pointer) {
    void *raw = pointer == NULL ? NULL : PyLong_AsVoidPtr(pointer);
    Py_XDECREF(pointer);
    return raw;
}

void *pointer_of_stream(PyObject *stream) {
    static PyObject *name;
    if (name == NULL && (name = PyUnicode_InternFromString("cuda_stream")) == NULL)
        return NULL;
    return take_pointer(PyObject_GetAttr(stream, name));
}

int driver_enter(const Driver *driver, void *context, int *is_pushed) {
    void *current = NULL;
    int code = driver->context_current(&current);
    *is_pushed = code == 0 && current != context;
    return *is_pushed ? driver->context_push(context) : code;
}

void driver_leave(const Driver *driver, int is_pushed) {
    void *popped;
    if (is_pushed)
        driver->context_pop(&popped);
}
