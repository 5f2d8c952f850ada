#include "timeline.h"

#include <atomic>
#include <mutex>

#include "device.h"

namespace rehearsal {

void Clock::include(const Moment& moment) {
  auto& ticket = tickets_[moment.stream];
  ticket = std::max(ticket, moment.ticket);
}

void Clock::include(const Clock& other) {
  for (const auto& [stream, ticket] : other.tickets_) include(Moment{stream, ticket});
}

bool Clock::covers(const Moment& moment) const {
  const auto found = tickets_.find(moment.stream);
  return found != tickets_.end() && found->second >= moment.ticket;
}

namespace timeline {
namespace {

std::mutex mutex;
std::map<StreamId, int64_t> newest_tickets;
std::map<StreamId, Clock> stream_clocks;
Clock host_clock;
std::atomic<int64_t> num_streams{0};
thread_local int64_t current_numbers[kMaxDevices] = {};

}  // namespace

StreamId new_stream(c10::DeviceIndex device) { return {device, ++num_streams}; }

StreamId current_stream(c10::DeviceIndex device) { return {device, current_numbers[device]}; }

void set_current_stream(StreamId stream) { current_numbers[stream.device] = stream.number; }

Moment launch(StreamId stream) {
  std::lock_guard<std::mutex> lock(mutex);
  const Moment moment{stream, ++newest_tickets[stream]};
  stream_clocks[stream].include(moment);
  return moment;
}

Clock end_of(StreamId stream) {
  std::lock_guard<std::mutex> lock(mutex);
  return stream_clocks[stream];
}

Clock end_of_device(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex);
  Clock all;
  for (const auto& [stream, clock] : stream_clocks)
    if (stream.device == device) all.include(clock);
  return all;
}

void stream_waits(StreamId stream, const Clock& clock) {
  std::lock_guard<std::mutex> lock(mutex);
  stream_clocks[stream].include(clock);
}

void host_waits(const Clock& clock) {
  std::lock_guard<std::mutex> lock(mutex);
  host_clock.include(clock);
}

bool is_ordered(const Moment& earlier, StreamId later) {
  if (earlier.stream == later || earlier.ticket == 0) return true;
  std::lock_guard<std::mutex> lock(mutex);
  return stream_clocks[later].covers(earlier) || host_clock.covers(earlier);
}

bool host_has_seen(const Moment& moment) {
  std::lock_guard<std::mutex> lock(mutex);
  return host_clock.covers(moment);
}

}  // namespace timeline
}  // namespace rehearsal
