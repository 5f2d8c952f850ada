// Reports to Python: host waits, copies, hazards and NCCL calls of the rehearsal device.
#pragma once
#include <cstdint>
#include <string>

namespace rehearsal {

constexpr const char* kSync = "sync";
constexpr const char* kToDevice = "h2d";
constexpr const char* kToHost = "d2h";
constexpr const char* kHazard = "hazard";
constexpr const char* kNccl = "nccl";

using Listener = void (*)(const char* kind, const std::string& name, int64_t bytes);

// Install the function that receives reports, or nullptr to switch them off.
void set_listener(Listener listener);

// Pass one observation on. The caller must not hold a lock of the device, since the listener takes Python's.
void report(const char* kind, const std::string& name, int64_t bytes = 0);

}  // namespace rehearsal
