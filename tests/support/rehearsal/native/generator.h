// Random numbers of the device: a seed and an offset, as in CUDA's generators.
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace rehearsal {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// A CPU generator for one operator call. It depends on seed and offset of `generator`, which then moves on.
at::Generator next_host_generator(at::Generator generator);

}  // namespace rehearsal
