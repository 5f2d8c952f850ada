// The rehearsal device: how many there are, which is current, and how the host waits for it.
#pragma once
#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace rehearsal {

constexpr int kMaxDevices = 16;

// Visible devices: REHEARSAL_DEVICES (8) of them, restricted by CUDA_VISIBLE_DEVICES as the driver does it.
int device_count();
// The number of a visible device on this machine, which differs from its index under CUDA_VISIBLE_DEVICES.
int physical_device(c10::DeviceIndex device);

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);

// Sets a current device and restores the one before.
class DeviceScope {
 public:
  explicit DeviceScope(c10::DeviceIndex device) : previous_(current_device()) { set_current_device(device); }
  ~DeviceScope() { set_current_device(previous_); }
  DeviceScope(const DeviceScope&) = delete;

 private:
  c10::DeviceIndex previous_;
};

// Note that this process uses the device. A child that is forked afterwards cannot use it, as with CUDA.
void begin_use();
bool is_in_bad_fork();

// Host waits. Each reports "sync" and delivers the asynchronous copies that are complete then.
void wait_for_current_stream(c10::DeviceIndex device, const std::string& name, int64_t bytes = 0);
void wait_for_device(c10::DeviceIndex device, const std::string& name);

}  // namespace rehearsal
