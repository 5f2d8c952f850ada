// Copies between host and device.
#pragma once
#include <ATen/core/Tensor.h>

namespace rehearsal {

// `target.copy_(source)`, for which at least one of the two is on the device.
at::Tensor& copy(at::Tensor& target, const at::Tensor& source, bool non_blocking);

// Complete the asynchronous copies that the host has waited for.
void deliver_transfers();

}  // namespace rehearsal
