#include "memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "device.h"
#include "reports.h"

namespace rehearsal {
namespace {

constexpr size_t kTotalBytes = size_t(80) << 30;
constexpr int kPoison = 0xFF;

struct Usage {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0;
  void add(int64_t amount) {
    current += amount;
    allocated += amount;
    peak = std::max(peak, current);
  }
  void remove(int64_t amount) {
    current -= amount;
    freed += amount;
  }
};

std::mutex usage_mutex;
Usage used_bytes[kMaxDevices], used_blocks[kMaxDevices];

void count_allocation(c10::DeviceIndex device, int64_t bytes) {
  std::lock_guard<std::mutex> lock(usage_mutex);
  used_bytes[device].add(bytes);
  used_blocks[device].add(1);
}

void count_release(c10::DeviceIndex device, int64_t bytes) {
  std::lock_guard<std::mutex> lock(usage_mutex);
  used_bytes[device].remove(bytes);
  used_blocks[device].remove(1);
}

// One allocation, with the newest work of each stream on it.
struct Block {
  c10::DataPtr fresh;     // Either memory of its own
  c10::Storage adopted;   // or the result of a CPU kernel.
  StreamId home;          // Freed memory is reused by this stream.
  int64_t bytes = 0;
  std::mutex mutex;
  Moment last_write;
  std::vector<Moment> last_uses;
  std::vector<StreamId> protectors;

  void use(const Moment& moment) {
    for (auto& use : last_uses)
      if (use.stream == moment.stream) {
        use = moment;
        return;
      }
    last_uses.push_back(moment);
  }

  bool is_free_of_races() const {
    return std::all_of(last_uses.begin(), last_uses.end(), [this](const Moment& use) {
      const bool is_protected = std::find(protectors.begin(), protectors.end(), use.stream) != protectors.end();
      return is_protected || timeline::is_ordered(use, home);
    });
  }
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (!block->is_free_of_races())
    report(kHazard, "memory freed while another stream may use it: call record_stream, or wait first", block->bytes);
  count_release(block->home.device, block->bytes);
  delete block;
}

c10::DataPtr as_device_memory(void* pointer, Block* block, c10::DeviceIndex device, int64_t bytes) {
  block->home = timeline::current_stream(device);
  block->bytes = bytes;
  count_allocation(device, bytes);
  return {pointer, block, &release, c10::Device(c10::kCUDA, device)};
}

Block* block_of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  const auto& pointer = tensor.storage().data_ptr();
  return pointer.get_deleter() == &release ? static_cast<Block*>(pointer.get_context()) : nullptr;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    begin_use();
    auto memory = c10::GetCPUAllocator()->allocate(bytes);
    void* pointer = memory.get();
    if (pointer != nullptr) std::memset(pointer, kPoison, bytes);
    auto* block = new Block();
    block->fresh = std::move(memory);
    return as_device_memory(pointer, block, current_device(), static_cast<int64_t>(bytes));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { wait_for_device(current_device(), "empty_cache"); }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get_deleter() != &release) return;
    auto* block = static_cast<Block*>(pointer.get_context());
    std::lock_guard<std::mutex> lock(block->mutex);
    block->protectors.push_back({stream.device_index(), stream.id()});
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    std::lock_guard<std::mutex> lock(usage_mutex);
    const auto fill = [](auto& statistic, const Usage& usage) {
      statistic[0].current = usage.current;
      statistic[0].peak = usage.peak;
      statistic[0].allocated = usage.allocated;
      statistic[0].freed = usage.freed;
    };
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes, &stats.reserved_bytes})
      fill(*bytes, used_bytes[device]);
    for (auto* blocks : {&stats.allocation, &stats.active, &stats.segment}) fill(*blocks, used_blocks[device]);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(usage_mutex);
    for (auto* usage : {&used_bytes[device], &used_blocks[device]}) usage->allocated = usage->freed = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(usage_mutex);
    for (auto* usage : {&used_bytes[device], &used_blocks[device]}) usage->peak = usage->current;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(usage_mutex);
    return {kTotalBytes - used_bytes[device].current, kTotalBytes};
  }
};
DeviceMemory device_memory;

std::mutex pinned_mutex;
std::map<uintptr_t, size_t> pinned_ranges;

void release_pinned(void* context) {
  auto* memory = static_cast<c10::DataPtr*>(context);
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_ranges.erase(reinterpret_cast<uintptr_t>(memory->get()));
  }
  delete memory;
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    begin_use();
    const size_t size = std::max<size_t>(bytes, 1);
    auto* memory = new c10::DataPtr(c10::GetCPUAllocator()->allocate(size));
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_ranges[reinterpret_cast<uintptr_t>(memory->get())] = size;
    return {memory->get(), memory, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedMemory pinned_memory;

at::Tensor alias_over(c10::DataPtr pointer, const at::Tensor& tensor) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(pointer), c10::GetCPUAllocator(), true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return alias;
}

std::string race(const std::string& name, const char* what, StreamId other) {
  return name + what + " of stream " + std::to_string(other.number) + " without waiting for it";
}

}  // namespace

c10::DeviceAllocator* device_allocator() { return &device_memory; }

void install_allocators() {
  c10::SetAllocator(c10::kCUDA, &device_memory, 255);
  at::setHostAllocator(c10::kCUDA, &pinned_memory, 255);
}

bool is_pinned(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto next = pinned_ranges.upper_bound(address);
  if (next == pinned_ranges.begin()) return false;
  const auto& [start, size] = *--next;
  return address < start + size;
}

void register_host(uintptr_t address, size_t bytes) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned_ranges[address] = bytes;
}

void unregister_host(uintptr_t address) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned_ranges.erase(address);
}

c10::Storage adopt(const c10::Storage& host_storage, c10::DeviceIndex device) {
  auto* block = new Block();
  block->adopted = host_storage;
  const auto bytes = static_cast<int64_t>(host_storage.nbytes());
  auto memory = as_device_memory(host_storage.mutable_data(), block, device, bytes);
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory), &device_memory, true);
}

void replace_memory(const c10::Storage& device_storage, const c10::Storage& host_storage) {
  auto* block = new Block();
  block->adopted = host_storage;
  const auto bytes = static_cast<int64_t>(host_storage.nbytes());
  auto memory = as_device_memory(host_storage.mutable_data(), block, device_storage.device().index(), bytes);
  device_storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
  device_storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

void resize_storage(const c10::Storage& storage, int64_t bytes) {
  const DeviceScope scope(storage.device().index());
  auto memory = device_memory.allocate(bytes);
  const size_t kept = std::min<size_t>(bytes, storage.nbytes());
  if (kept > 0) std::memcpy(memory.get(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

at::Tensor host_alias(const at::Tensor& tensor) {
  return alias_over(c10::DataPtr(tensor.storage().mutable_data(), c10::Device(c10::kCPU)), tensor);
}

at::Tensor owning_host_alias(const at::Tensor& tensor) {
  auto* owner = new c10::Storage(tensor.storage());
  const auto drop = [](void* context) { delete static_cast<c10::Storage*>(context); };
  return alias_over(c10::DataPtr(owner->mutable_data(), owner, drop, c10::Device(c10::kCPU)), tensor);
}

at::Tensor device_tensor(c10::Storage storage, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return tensor;
}

void note_read(const at::Tensor& tensor, const Moment& moment, const std::string& name) {
  auto* block = block_of(tensor);
  if (block == nullptr) return;
  Moment written;
  {
    std::lock_guard<std::mutex> lock(block->mutex);
    written = block->last_write;
    block->use(moment);
  }
  if (!timeline::is_ordered(written, moment.stream))
    report(kHazard, race(name, " reads a result", written.stream), static_cast<int64_t>(tensor.nbytes()));
}

void note_write(const at::Tensor& tensor, const Moment& moment, const std::string& name) {
  auto* block = block_of(tensor);
  if (block == nullptr) return;
  std::vector<Moment> uses;
  {
    std::lock_guard<std::mutex> lock(block->mutex);
    uses = block->last_uses;
    block->last_write = moment;
    block->use(moment);
  }
  for (const auto& use : uses)
    if (!timeline::is_ordered(use, moment.stream))
      report(kHazard, race(name, " overwrites memory", use.stream), static_cast<int64_t>(tensor.nbytes()));
}

void protect(const at::Tensor& tensor, StreamId stream) {
  auto* block = block_of(tensor);
  if (block == nullptr) return;
  std::lock_guard<std::mutex> lock(block->mutex);
  if (std::find(block->protectors.begin(), block->protectors.end(), stream) == block->protectors.end())
    block->protectors.push_back(stream);
}

}  // namespace rehearsal
