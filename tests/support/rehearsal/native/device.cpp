// The parts of a backend that torch asks for outside operators: device guard, streams, events and CUDA hooks.
#include "device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <sstream>
#include <vector>

#include "generator.h"
#include "memory.h"
#include "reports.h"
#include "transfers.h"

namespace rehearsal {
namespace {

constexpr int kDefaultDevices = 8;

thread_local c10::DeviceIndex the_current_device = 0;
std::atomic<pid_t> owner{0};

std::vector<int> visible_devices() {
  const char* number = std::getenv("REHEARSAL_DEVICES");
  const int installed = std::min(number == nullptr ? kDefaultDevices : std::atoi(number), kMaxDevices);
  std::vector<int> devices;
  const char* selection = std::getenv("CUDA_VISIBLE_DEVICES");
  if (selection == nullptr) {
    for (int device = 0; device < installed; ++device) devices.push_back(device);
    return devices;
  }
  std::stringstream entries(selection);
  for (std::string entry; std::getline(entries, entry, ',');) {
    char* end = nullptr;
    const long device = std::strtol(entry.c_str(), &end, 10);
    // The driver ignores everything after the first entry that is no device.
    if (end == entry.c_str() || device < 0 || device >= installed) break;
    devices.push_back(static_cast<int>(device));
  }
  return devices;
}

void finish_waiting(const Clock& clock) {
  timeline::host_waits(clock);
  deliver_transfers();
}

void host_wait(const Clock& clock, const std::string& name, int64_t bytes) {
  report(kSync, name, bytes);
  finish_waiting(clock);
}

// A recorded event: the work before it, and the time of the record.
struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

StreamId id_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

c10::Stream stream_of(StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, id.device), id.number);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  c10::Device getDevice() const override { return c10::Device(c10::kCUDA, current_device()); }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) the_current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto previous = getDevice();
    setDevice(device);
    return previous;
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(timeline::current_stream(device.has_index() ? device.index() : current_device()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of({device.index(), 0}); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(timeline::new_stream(device.has_index() ? device.index() : current_device()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto previous = getStream(stream.device());
    timeline::set_current_stream(id_of(stream));
    return previous;
  }
  bool queryStream(const c10::Stream& stream) const override {
    finish_waiting(timeline::end_of(id_of(stream)));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_wait(timeline::end_of(id_of(stream)), "stream.synchronize", 0);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    wait_for_device(device, "device.synchronize");
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    *static_cast<Event*>(*event) = {timeline::end_of(id_of(stream)), std::chrono::steady_clock::now()};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) timeline::stream_waits(id_of(stream), static_cast<Event*>(event)->clock);
  }
  // The device is never behind. A host that polls knows of the work from then on.
  bool queryEvent(void* event) const override {
    if (event != nullptr) finish_waiting(static_cast<Event*>(event)->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) host_wait(static_cast<Event*>(event)->clock, "event.synchronize", 0);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "Both events must be recorded before their times are compared.");
    const auto elapsed = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator()->recordStream(pointer, stream);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasCUDA() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceIndex current_device() const override { return rehearsal::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return rehearsal::current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto previous = rehearsal::current_device();
    set_current_device(device);
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? rehearsal::current_device() : exchangeDevice(device);
  }
  void deviceSynchronize(c10::DeviceIndex device) const override { wait_for_device(device, "device.synchronize"); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(c10::kCUDA); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(c10::kCUDA, rehearsal::current_device()); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? rehearsal::current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? rehearsal::current_device() : device);
  }
};

c10::impl::DeviceGuardImplRegistrar guard_registrar(c10::kCUDA, new Guard());

}  // namespace

int device_count() { return static_cast<int>(visible_devices().size()); }

int physical_device(c10::DeviceIndex device) { return visible_devices().at(device); }

c10::DeviceIndex current_device() { return the_current_device; }

void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "CUDA error: invalid device ordinal (", static_cast<int>(device),
              " of ", device_count(), " visible rehearsal devices)");
  the_current_device = device;
}

void begin_use() {
  pid_t nobody = 0;
  owner.compare_exchange_strong(nobody, getpid());
  TORCH_CHECK(!is_in_bad_fork(), "CUDA error: initialization error: the parent of this forked process used the device");
}

bool is_in_bad_fork() { return owner != 0 && owner != getpid(); }

void wait_for_current_stream(c10::DeviceIndex device, const std::string& name, int64_t bytes) {
  host_wait(timeline::end_of(timeline::current_stream(device)), name, bytes);
}

void wait_for_device(c10::DeviceIndex device, const std::string& name) {
  host_wait(timeline::end_of_device(device < 0 ? current_device() : device), name, 0);
}

}  // namespace rehearsal

namespace at {
using HooksOfRehearsal = rehearsal::Hooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", HooksOfRehearsal)
}  // namespace at
