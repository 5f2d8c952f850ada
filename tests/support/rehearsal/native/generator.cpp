#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>
#include <vector>

#include "device.h"

namespace rehearsal {
namespace {

constexpr uint64_t kOffsetStep = 4;
constexpr size_t kStateBytes = 2 * sizeof(uint64_t);

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const auto state = at::detail::empty_cpu({static_cast<int64_t>(kStateBytes)}, at::kByte);
    const uint64_t words[] = {seed_, offset_};
    std::memcpy(state.mutable_data_ptr(), words, kStateBytes);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() &&
                    state.numel() == static_cast<int64_t>(kStateBytes),
                "RNG state must be a torch.ByteTensor of ", kStateBytes, " bytes on the CPU");
    uint64_t words[2];
    std::memcpy(words, state.data(), kStateBytes);
    seed_ = words[0];
    offset_ = words[1];
  }

  uint64_t advance() {
    // Any mixture will do that differs for each pair.
    const uint64_t mixed = seed_ * 0x9E3779B97F4A7C15ULL ^ (offset_ + 0x632BE59BD9B4E019ULL) * 0xD6E8FEB86659FD93ULL;
    offset_ += kOffsetStep;
    return mixed;
  }

 private:
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

}  // namespace

at::Generator new_generator(c10::DeviceIndex device) { return at::make_generator<DeviceGenerator>(device); }

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex index = 0; index < kMaxDevices; ++index) made.push_back(new_generator(index));
    return made;
  }();
  return generators.at(device);
}

at::Generator next_host_generator(at::Generator generator) {
  TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
              generator.device().type(), "'");
  std::lock_guard<std::mutex> lock(generator.mutex());
  return at::detail::createCPUGenerator(generator.get<DeviceGenerator>()->advance());
}

}  // namespace rehearsal
