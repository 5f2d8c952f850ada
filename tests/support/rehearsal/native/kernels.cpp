// Operators that a backend must write itself: creation, storages, copies and the choice of attention kernel.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include "device.h"
#include "memory.h"
#include "transfers.h"

namespace rehearsal {
namespace {

using at::Tensor;

const c10::DispatchKeySet kKeys{c10::DispatchKey::CUDA};

c10::DeviceIndex index_of(std::optional<c10::Device> device) {
  return device.has_value() && device->has_index() ? device->index() : current_device();
}

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const DeviceScope scope(index_of(device));
  return at::detail::empty_generic(sizes, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const DeviceScope scope(index_of(device));
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() == sizes) return self;
  impl->set_sizes_contiguous(sizes);
  const auto needed = static_cast<int64_t>((impl->numel() + impl->storage_offset()) * impl->itemsize());
  if (needed > static_cast<int64_t>(self.storage().nbytes())) resize_storage(self.storage(), needed);
  return self;
}

Tensor& set_region(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (strides.size() == sizes.size() && !strides.empty()) {
    impl->set_sizes_and_strides(sizes, strides);
  } else {
    impl->set_sizes_contiguous(sizes);
  }
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_region(self, std::move(source), 0, {length}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_region(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& self) {
  const DeviceScope scope(self.device().index());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_region(self, std::move(storage), 0, {0}, {1});
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  auto result = target;
  return copy(result, source, non_blocking);
}

void record_stream(Tensor& self, c10::Stream stream) { protect(self, {stream.device_index(), stream.id()}); }

// Torch decomposes attention into operators that every backend has.
int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return static_cast<int64_t>(0);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("resize_", TORCH_FN(resize));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_region));
  library.impl("set_.source_Storage", TORCH_FN(set_storage));
  library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  library.impl("set_", TORCH_FN(set_empty));
  library.impl("copy_", TORCH_FN(copy));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("record_stream", TORCH_FN(record_stream));
}

struct AttentionChoice {
  AttentionChoice() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention); }
} attention_choice;

}  // namespace
}  // namespace rehearsal
