// Boxed fallback of the CUDA dispatch key: every other operator runs its CPU kernel on the device's memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "device.h"
#include "generator.h"
#include "memory.h"
#include "reports.h"

namespace rehearsal {
namespace {

using at::Tensor;
using torch::jit::Stack;

// The shape of the result, or the result itself, is a number that the host must read.
const std::unordered_set<std::string_view> kWaitingOperators = {
    "aten::_local_scalar_dense", "aten::_unique", "aten::_unique2", "aten::bincount", "aten::equal",
    "aten::masked_select", "aten::multinomial", "aten::nonzero", "aten::unique_consecutive", "aten::unique_dim",
};
const std::unordered_set<std::string_view> kIndexOperators = {
    "aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
};

// One call of an operator: arguments to the CPU, kernel, results back to the device.
class OperatorCall {
 public:
  OperatorCall(const c10::OperatorHandle& handle, Stack* stack)
      : handle_(handle),
        schema_(handle.schema()),
        name_(schema_.name()),
        stack_(stack),
        first_(stack->size() - schema_.arguments().size()) {}

  void run() {
    for (size_t index = 0; index < schema_.arguments().size(); ++index) translate_argument(index);
    check_devices();
    if (device_ < 0) device_ = current_device();
    note_accesses();
    note_host_wait();
    run_kernel();
    for (auto& alias : aliases_) restore(alias);
    for (size_t index = stack_->size() - schema_.returns().size(); index < stack_->size(); ++index)
      translate_result((*stack_)[index]);
  }

 private:
  struct Alias {
    Tensor original, host;
    const void* memory;
    bool is_written;
  };

  void translate_argument(size_t index) {
    auto& value = (*stack_)[first_ + index];
    const auto* alias_info = schema_.arguments()[index].alias_info();
    is_written_ = alias_info != nullptr && alias_info->isWrite();
    if (value.isTensor()) {
      value = to_host(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> translated;
      for (const Tensor& tensor : value.toTensorVector()) translated.push_back(to_host(tensor));
      value = std::move(translated);
    } else if (value.isOptionalTensorList()) {
      const auto list = value.toOptionalTensorList();
      c10::List<std::optional<Tensor>> translated;
      for (size_t place = 0; place < list.size(); ++place) {
        const std::optional<Tensor> tensor = list.get(place);
        translated.push_back(tensor.has_value() ? std::optional<Tensor>(to_host(*tensor)) : std::nullopt);
      }
      value = std::move(translated);
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      makes_device_tensors_ = true;
      if (device_ < 0 && value.toDevice().has_index()) device_ = value.toDevice().index();
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      value = next_host_generator(value.toGenerator());
      has_generator_ = true;
    }
  }

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return tensor;
    if (!tensor.is_cuda()) {
      // Numbers may come from the host, as an argument of the kernel.
      if (tensor.device().is_cpu() && tensor.dim() > 0) host_bytes_ += static_cast<int64_t>(tensor.nbytes());
      has_host_tensor_ |= tensor.device().is_cpu() && tensor.dim() > 0;
      return tensor;
    }
    const auto device = tensor.device().index();
    TORCH_CHECK(device_ < 0 || device_ == device, "Expected all tensors to be on the same device, but ", name_,
                " found at least two devices, cuda:", static_cast<int>(device_), " and ", tensor.device(), "!");
    device_ = device;
    makes_device_tensors_ = true;
    auto alias = host_alias(tensor);
    aliases_.push_back({tensor, alias, alias.storage().data(), is_written_});
    return alias;
  }

  void check_devices() {
    if (!has_host_tensor_ || aliases_.empty()) return;
    const std::string_view name = name_;
    if (kIndexOperators.count(name) != 0) {
      // Torch copies indices to the device, from pageable memory.
      report(kToDevice, name_ + " with indices on the host", host_bytes_);
      wait_for_current_stream(device_, name_ + " with indices on the host", host_bytes_);
      return;
    }
    // These take lists of numbers as a tensor on the host.
    if (name.starts_with("aten::_foreach_") && schema_.overload_name() == "Tensor") return;
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but ", name_,
                " found at least two devices, cuda:", static_cast<int>(device_), " and cpu!");
  }

  bool is_view() const {
    return std::any_of(schema_.returns().begin(), schema_.returns().end(), [](const c10::Argument& result) {
      return result.alias_info() != nullptr && !result.alias_info()->isWrite();
    });
  }

  void note_accesses() {
    if (is_view()) return;
    moment_ = timeline::launch(timeline::current_stream(device_));
    for (const auto& alias : aliases_)
      (alias.is_written ? note_write : note_read)(alias.original, moment_, name_);
  }

  void note_host_wait() {
    if (kWaitingOperators.count(name_) != 0 || has_unknown_length()) {
      wait_for_current_stream(device_, name_);
    } else if (kIndexOperators.count(name_) != 0 && has_mask()) {
      wait_for_current_stream(device_, name_ + " with a mask");
    }
  }

  bool has_unknown_length() const {
    return name_ == "aten::repeat_interleave" && schema_.overload_name() == "Tensor" && stack_->back().isNone();
  }

  bool has_mask() const {
    const auto indices = (*stack_)[first_ + 1].toOptionalTensorList();
    for (size_t place = 0; place < indices.size(); ++place) {
      const std::optional<Tensor> tensor = indices.get(place);
      if (!tensor.has_value() || !tensor->defined()) continue;
      if (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte) return true;
    }
    return false;
  }

  void run_kernel() {
    const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
    const auto& tags = handle_.getTags();
    const bool is_random = std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) != tags.end();
    if (!is_random || has_generator_) return handle_.redispatchBoxed(keys, stack_);
    const auto generator = next_host_generator(default_generator(device_));
    if (give_generator(generator)) return handle_.redispatchBoxed(keys, stack_);
    // The kernel draws from the default generator of the CPU, so lend it another state.
    auto host = at::detail::getDefaultCPUGenerator();
    const auto before = host.get_state();
    host.set_state(generator.get_state());
    try {
      handle_.redispatchBoxed(keys, stack_);
    } catch (...) {
      host.set_state(before);
      throw;
    }
    host.set_state(before);
  }

  bool give_generator(const at::Generator& generator) {
    for (size_t index = 0; index < schema_.arguments().size(); ++index)
      if (schema_.arguments()[index].name() == "generator") {
        (*stack_)[first_ + index] = generator;
        return true;
      }
    return false;
  }

  // Carry over what the kernel did to an argument besides its contents: other memory, another shape.
  static void restore(const Alias& alias) {
    if (alias.host.storage().data() != alias.memory) replace_memory(alias.original.storage(), alias.host.storage());
    const bool has_same_shape = alias.host.sizes() == alias.original.sizes() &&
        alias.host.strides() == alias.original.strides() &&
        alias.host.storage_offset() == alias.original.storage_offset();
    if (has_same_shape) return;
    auto* impl = alias.original.unsafeGetTensorImpl();
    impl->set_storage_offset(alias.host.storage_offset());
    impl->set_sizes_and_strides(alias.host.sizes(), alias.host.strides());
  }

  void translate_result(c10::IValue& value) {
    if (!makes_device_tensors_) return;
    if (value.isTensor()) {
      value = to_device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> translated;
      for (const Tensor& tensor : value.toTensorVector()) translated.push_back(to_device(tensor));
      value = std::move(translated);
    }
  }

  Tensor to_device(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu() || !tensor.has_storage()) return tensor;
    for (const auto& alias : aliases_) {
      if (tensor.is_same(alias.host)) return alias.original;
      if (tensor.storage().is_alias_of(alias.host.storage())) return device_tensor(alias.original.storage(), tensor);
    }
    auto result = device_tensor(adopt(tensor.storage(), device_), tensor);
    if (moment_.ticket != 0) note_write(result, moment_, name_);
    return result;
  }

  const c10::OperatorHandle& handle_;
  const c10::FunctionSchema& schema_;
  const std::string& name_;
  Stack* stack_;
  size_t first_;
  std::vector<Alias> aliases_;
  Moment moment_;
  c10::DeviceIndex device_ = -1;
  int64_t host_bytes_ = 0;
  bool is_written_ = false;
  bool has_host_tensor_ = false;
  bool has_generator_ = false;
  bool makes_device_tensors_ = false;
};

void run_on_host(const c10::OperatorHandle& handle, Stack* stack) { OperatorCall(handle, stack).run(); }

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace
}  // namespace rehearsal
