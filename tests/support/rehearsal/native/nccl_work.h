// Work of the process group, and the trace of its launches and waits.
#pragma once
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"
#include "timeline.h"

namespace rehearsal::nccl {

using Tensors = std::vector<at::Tensor>;

constexpr int kNoPeer = -1;
constexpr int64_t kNoBatch = 0;

struct TraceEntry {
  const char* event;
  int64_t work;
  std::string group;
  std::vector<uint64_t> members;
  std::string operation;
  int peer;
  int64_t bytes;
  int64_t batch;
};

inline std::mutex trace_mutex;
inline std::vector<TraceEntry> trace;
inline std::atomic<bool> is_tracing{false};
inline std::atomic<int64_t> num_works{0};

inline void add_to_trace(TraceEntry entry) {
  if (!is_tracing) return;
  std::lock_guard<std::mutex> lock(trace_mutex);
  trace.push_back(std::move(entry));
}

// One launch, or one batch of point-to-point operations.
class NcclWork final : public c10d::Work {
 public:
  explicit NcclWork(bool blocks_host = false) : c10d::Work(-1, c10d::OpType::UNKNOWN), blocks_host_(blocks_host) {}

  const int64_t number = ++num_works;

  void add(c10::intrusive_ptr<c10d::Work> part, const Tensors& results, std::function<void()> epilogue,
           StreamId stream) {
    parts_.push_back(std::move(part));
    results_.insert(results_.end(), results.begin(), results.end());
    if (epilogue) epilogues_.push_back(std::move(epilogue));
    stream_ = stream;
    end_.include(timeline::end_of(stream));
  }

  bool wait(std::chrono::milliseconds) override {
    add_to_trace({"wait", number, "", {}, "", kNoPeer, 0, kNoBatch});
    finish_parts();
    timeline::stream_waits(timeline::current_stream(stream_.device), end_);
    if (blocks_host_) wait_for_current_stream(stream_.device, "barrier");
    return true;
  }
  void synchronize() override { wait(::kNoTimeout); }
  void blockCurrentStream() override { wait(::kNoTimeout); }

  // Gloo cannot tell whether a message has arrived, only wait for it. So a message is complete when someone waited.
  bool isCompleted() override {
    if (is_finished_) return true;
    if (!has_futures) return false;
    for (auto& part : parts_)
      if (!part->isCompleted()) return false;
    finish_parts();
    return true;
  }
  bool isSuccess() const override { return true; }
  Tensors result() override { return results_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const auto self = c10::intrusive_ptr<NcclWork>::reclaim_copy(this);
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{c10::Device(c10::kCUDA, stream_.device)});
    if (parts_.size() == 1 && has_futures) {
      parts_[0]->getFuture()->addCallback([self, future](c10::ivalue::Future& part) {
        if (part.hasError()) {
          future->setError(part.exception_ptr());
        } else {
          self->complete(*future);
        }
      });
    } else {
      finish_parts();
      complete(*future);
    }
    return future;
  }

  bool has_futures = true;

 private:
  void finish_parts() {
    std::lock_guard<std::mutex> lock(finish_mutex_);
    // Gloo would wait for a second message.
    if (is_finished_) return;
    for (auto& part : parts_) part->wait();
    run_epilogues();
    is_finished_ = true;
  }

  void run_epilogues() {
    std::lock_guard<std::mutex> lock(epilogue_mutex_);
    for (auto& epilogue : epilogues_) epilogue();
    epilogues_.clear();
  }

  // A future remembers the streams that are current here, and later makes the waiting stream wait for them.
  void complete(c10::ivalue::Future& future) {
    run_epilogues();
    const auto before = timeline::current_stream(stream_.device);
    timeline::set_current_stream(stream_);
    future.markCompleted(c10::IValue(results_));
    timeline::set_current_stream(before);
  }

  std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
  Tensors results_;
  std::vector<std::function<void()>> epilogues_;
  std::mutex epilogue_mutex_, finish_mutex_;
  std::atomic<bool> is_finished_{false};
  StreamId stream_;
  Clock end_;
  bool blocks_host_;
};

}  // namespace rehearsal::nccl
