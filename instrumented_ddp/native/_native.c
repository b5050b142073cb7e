/* What runs for every gradient, record and collective, in C.
 *
 * `_native.pyi` is the contract. The twins in Python say why things are as they are, and pass the same tests:
 * `overlapscope.trace.event_log.RecordStore` and `overlapscope.trace.collective_log.EntryStore` (here `_stores.c`),
 * `instrumented_ddp.native.countdown.Countdown` (`_countdown.c`), `instrumented_ddp.native.finite.FiniteProbe`
 * (`_finite.c`), `instrumented_ddp.recording.timing.CudaTimer` (`_marks.c` for Python, `_timeline.c` for a thread without its lock) and
 * `instrumented_ddp.collectives.device_events.TorchEvents` (`_events.c`). Against Python's limited API and without the
 * headers of torch or CUDA, so that one build serves all versions of them.
 */

#include "_native.h"

static int execute(PyObject *module) {
    if (PyModule_AddIntConstant(module, "INTERFACE", 6))
        return -1;
    return add_stores(module) || add_countdown(module) || add_finite(module) || add_marks(module) || add_events(module)
               ? -1
               : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, NULL, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
