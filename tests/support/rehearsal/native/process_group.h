#pragma once
#include <pybind11/pybind11.h>

namespace rehearsal {

void bind_process_group(pybind11::module_& module);

}  // namespace rehearsal
