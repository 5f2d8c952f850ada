// Memory of the rehearsal device and pinned memory of the host.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "timeline.h"

namespace rehearsal {

// Fresh memory is filled with ones, which are NaN in every floating-point format.
c10::DeviceAllocator* device_allocator();
void install_allocators();

bool is_pinned(const void* pointer);
// Pin memory that the caller has allocated (cudaHostRegister), and unpin it.
void register_host(uintptr_t address, size_t bytes);
void unregister_host(uintptr_t address);

// Give the storage of a CPU tensor to the device. No bytes are copied.
c10::Storage adopt(const c10::Storage& host_storage, c10::DeviceIndex device);
// The same for a storage whose tensors must see the new memory.
void replace_memory(const c10::Storage& device_storage, const c10::Storage& host_storage);
void resize_storage(const c10::Storage& storage, int64_t bytes);

// A CPU tensor over the memory of a device tensor. An owning one keeps that memory alive.
at::Tensor host_alias(const at::Tensor& tensor);
at::Tensor owning_host_alias(const at::Tensor& tensor);
// A device tensor with the shape of `like`.
at::Tensor device_tensor(c10::Storage storage, const at::Tensor& like);

// Check work against earlier work on the same memory, and report a hazard if another stream's work is not complete.
void note_read(const at::Tensor& tensor, const Moment& moment, const std::string& name);
void note_write(const at::Tensor& tensor, const Moment& moment, const std::string& name);
// Keep freed memory from reuse until the stream has finished with it (`Tensor.record_stream`).
void protect(const at::Tensor& tensor, StreamId stream);

}  // namespace rehearsal
