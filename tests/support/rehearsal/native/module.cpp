// Python module of the rehearsal device.
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>

#include "device.h"
#include "generator.h"
#include "memory.h"
#include "process_group.h"
#include "reports.h"

namespace py = pybind11;

namespace rehearsal {
namespace {

std::atomic<Listener> the_listener{nullptr};
PyObject* callback = nullptr;

void call_python(const char* kind, const std::string& name, int64_t bytes) {
  if (!Py_IsInitialized()) return;
  const py::gil_scoped_acquire gil;
  if (callback == nullptr) return;
  try {
    py::reinterpret_borrow<py::object>(callback)(kind, name, bytes);
  } catch (py::error_already_set& error) {
    // Reports come from destructors too, which must not throw.
    error.discard_as_unraisable("record of the rehearsal device");
  }
}

void watch(const py::object& function) {
  Py_CLEAR(callback);
  if (!function.is_none()) callback = py::object(function).release().ptr();
  set_listener(callback == nullptr ? nullptr : &call_python);
}

py::object generator_of(c10::DeviceIndex device) {
  return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator(device)));
}

}  // namespace

void set_listener(Listener listener) { the_listener = listener; }

void report(const char* kind, const std::string& name, int64_t bytes) {
  if (const auto listener = the_listener.load()) listener(kind, name, bytes);
}

}  // namespace rehearsal

PYBIND11_MODULE(rehearsal_device, module) {
  using namespace rehearsal;
  install_allocators();
  module.def("watch", &watch);
  module.def("device_count", &device_count);
  module.def("is_in_bad_fork", &is_in_bad_fork);
  module.def("generator_of", &generator_of);
  module.def("register_host", &register_host);
  module.def("unregister_host", &unregister_host);
  module.def("resize_storage", &resize_storage);
  module.def("memory_info", [](c10::DeviceIndex device) { return device_allocator()->getMemoryInfo(device); });
  module.def("bind_process_group", [module] { auto target = module; bind_process_group(target); });
}
