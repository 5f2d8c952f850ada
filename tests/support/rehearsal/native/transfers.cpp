#include "transfers.h"

#include <ATen/Dispatch.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cstring>
#include <limits>
#include <mutex>
#include <vector>

#include "device.h"
#include "memory.h"
#include "reports.h"

namespace rehearsal {
namespace {

using at::Tensor;

// CUDA copies up to this size from pageable memory asynchronously. For larger ones the host waits.
constexpr int64_t kStagedBytes = 64 << 10;

// An asynchronous copy between the device and pinned memory that the host has not waited for.
struct Transfer {
  Moment moment;
  Tensor pinned;
  // The contents that `pinned` must have: the result of a copy to the host, or the source of a copy to the device.
  Tensor value;
  bool is_to_host = false;
};

std::mutex mutex;
std::vector<Transfer> transfers;

void add(Transfer transfer) {
  std::lock_guard<std::mutex> lock(mutex);
  transfers.push_back(std::move(transfer));
}

template <typename Condition>
std::vector<Transfer> take(Condition condition) {
  std::vector<Transfer> taken, rest;
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& transfer : transfers) (condition(transfer) ? taken : rest).push_back(std::move(transfer));
  transfers.swap(rest);
  return taken;
}

void complete(const std::vector<Transfer>& finished) {
  at::AutoDispatchBelowADInplaceOrView guard;
  for (const auto& transfer : finished) {
    if (transfer.is_to_host) {
      transfer.pinned.copy_(transfer.value);
    } else if (!transfer.pinned.is_contiguous() || std::memcmp(transfer.pinned.const_data_ptr(),
                   transfer.value.const_data_ptr(), transfer.value.nbytes()) != 0) {
      report(kHazard, "pinned source of an asynchronous copy changed before anything waited for the copy",
             static_cast<int64_t>(transfer.value.nbytes()));
    }
  }
}

bool shares_memory(const Transfer& transfer, const Tensor& tensor) {
  return transfer.is_to_host && transfer.pinned.storage().data() == tensor.storage().data();
}

// The device reads pinned memory that an earlier copy fills. On one stream this is in order, on two it is a race.
void settle_before_reading(const Tensor& pinned, StreamId stream) {
  const auto earlier = take([&](const Transfer& transfer) { return shares_memory(transfer, pinned); });
  complete(earlier);
  for (const auto& transfer : earlier)
    if (!timeline::is_ordered(transfer.moment, stream))
      report(kHazard, "copy from pinned memory that another stream still fills", static_cast<int64_t>(pinned.nbytes()));
}

// Host code that reads the target too early must notice.
void poison(const Tensor& pinned) {
  if (pinned.is_floating_point()) {
    pinned.fill_(std::numeric_limits<double>::quiet_NaN());
  } else if (pinned.scalar_type() == at::kBool) {
    pinned.fill_(true);
  } else {
    pinned.fill_(std::numeric_limits<int8_t>::max());
  }
}

std::string describe(bool non_blocking, const char* direction, bool pinned) {
  return std::string(non_blocking ? "non_blocking " : "blocking ") + direction + (pinned ? " pinned" : " pageable");
}

void copy_to_device(const Tensor& target, const Tensor& source, bool non_blocking) {
  const auto device = target.device().index();
  const auto stream = timeline::current_stream(device);
  const bool pinned = is_pinned(source.storage().data());
  const auto bytes = static_cast<int64_t>(source.nbytes());
  const auto name = describe(non_blocking, "from", pinned);
  if (pinned) settle_before_reading(source, stream);
  const auto moment = timeline::launch(stream);
  note_write(target, moment, "copy");
  host_alias(target).copy_(source);
  report(kToDevice, name, bytes);
  if (!non_blocking || (!pinned && bytes > kStagedBytes)) {
    wait_for_current_stream(device, "copy to the device, " + name, bytes);
  } else if (pinned && source.is_contiguous()) {
    add({moment, source.detach(), source.detach().clone(), false});
  }
}

void copy_to_host(const Tensor& target, const Tensor& source, bool non_blocking) {
  const auto device = source.device().index();
  const bool pinned = is_pinned(target.storage().data());
  const auto bytes = static_cast<int64_t>(source.nbytes());
  const auto name = describe(non_blocking, "to", pinned);
  const auto moment = timeline::launch(timeline::current_stream(device));
  note_read(source, moment, "copy");
  report(kToHost, name, bytes);
  if (non_blocking && pinned) {
    auto value = at::empty_like(target, target.options().pinned_memory(false));
    value.copy_(host_alias(source));
    poison(target);
    add({moment, target.detach(), value, true});
    return;
  }
  wait_for_current_stream(device, "copy to the host, " + name, bytes);
  target.copy_(host_alias(source));
}

void copy_on_device(const Tensor& target, const Tensor& source) {
  const auto theirs = timeline::current_stream(source.device().index());
  const auto ours = timeline::current_stream(target.device().index());
  // Between devices, torch makes both current streams wait for each other.
  if (theirs != ours) timeline::stream_waits(theirs, timeline::end_of(ours));
  const auto moment = timeline::launch(theirs);
  note_read(source, moment, "copy");
  note_write(target, moment, "copy");
  host_alias(target).copy_(host_alias(source));
  if (theirs != ours) timeline::stream_waits(ours, timeline::end_of(theirs));
}

}  // namespace

Tensor& copy(Tensor& target, const Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView guard;
  if (target.numel() == 0) return target;
  if (target.is_cuda() && source.is_cuda()) {
    copy_on_device(target, source);
  } else if (target.is_cuda()) {
    copy_to_device(target, source, non_blocking);
  } else {
    copy_to_host(target, source, non_blocking);
  }
  return target;
}

void deliver_transfers() {
  complete(take([](const Transfer& transfer) { return timeline::host_has_seen(transfer.moment); }));
}

}  // namespace rehearsal
