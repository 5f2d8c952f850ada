// Order of the device's work: streams, events and host waits, as vector clocks.
//
// Kernels run at once on the CPU, so nothing here delays work. The clocks answer one question: may this work rely on
// that work? It may if both run on one stream, if its stream waited for an event after that work, or if the host did.
#pragma once
#include <c10/core/Device.h>

#include <compare>
#include <map>

namespace rehearsal {

struct StreamId {
  c10::DeviceIndex device = 0;
  int64_t number = 0;  // 0 is the default stream.
  auto operator<=>(const StreamId&) const = default;
};

// A piece of work: the n-th launch on its stream.
struct Moment {
  StreamId stream;
  int64_t ticket = 0;
};

// For each stream, the newest work that is known to be complete.
class Clock {
 public:
  void include(const Moment& moment);
  void include(const Clock& other);
  bool covers(const Moment& moment) const;

 private:
  std::map<StreamId, int64_t> tickets_;
};

namespace timeline {

StreamId new_stream(c10::DeviceIndex device);

// The calling thread's stream on a device.
StreamId current_stream(c10::DeviceIndex device);
void set_current_stream(StreamId stream);

// Add work to a stream.
Moment launch(StreamId stream);

// Everything that is complete once the stream has reached its present end.
Clock end_of(StreamId stream);
Clock end_of_device(c10::DeviceIndex device);

void stream_waits(StreamId stream, const Clock& clock);
void host_waits(const Clock& clock);

bool is_ordered(const Moment& earlier, StreamId later);
bool host_has_seen(const Moment& moment);

}  // namespace timeline
}  // namespace rehearsal
