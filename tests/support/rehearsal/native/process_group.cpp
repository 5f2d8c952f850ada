// ProcessGroupNCCL of the rehearsal device: gloo carries the data, NCCL's rules decide what is allowed.
//
// Each communicator has a stream of its own, so a tensor that is used before `wait()` is a hazard. Launches and waits
// are traced on request. `order.py` replays the traces of all ranks by NCCL's order.
#include "process_group.h"

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

#include <cstdlib>
#include <functional>
#include <map>

#include "device.h"
#include "memory.h"
#include "nccl_work.h"
#include "reports.h"

namespace py = pybind11;

namespace rehearsal {
namespace {

using at::Tensor;
using c10::intrusive_ptr;
using c10d::ReduceOp;
using c10d::Work;
using nccl::kNoBatch;
using nccl::kNoPeer;
using nccl::NcclWork;
using nccl::Tensors;

py::list take_trace() {
  std::lock_guard<std::mutex> lock(nccl::trace_mutex);
  py::list entries;
  for (const auto& entry : nccl::trace) {
    py::dict fields;
    fields["event"] = entry.event;
    fields["work"] = entry.work;
    fields["group"] = entry.group;
    fields["members"] = entry.members;
    fields["operation"] = entry.operation;
    fields["peer"] = entry.peer;
    fields["bytes"] = entry.bytes;
    fields["batch"] = entry.batch;
    entries.append(fields);
  }
  nccl::trace.clear();
  return entries;
}

// What a launch needs besides its gloo operation.
struct Launch {
  const char* operation;
  Tensors reads, writes;
  int peer = kNoPeer;
  std::function<void()> epilogue = nullptr;
};

Tensors aliases_of(const Tensors& tensors) {
  Tensors aliases;
  for (const auto& tensor : tensors) aliases.push_back(owning_host_alias(tensor));
  return aliases;
}

std::vector<Tensors> aliases_of(const std::vector<Tensors>& lists) {
  std::vector<Tensors> aliases;
  for (const auto& tensors : lists) aliases.push_back(aliases_of(tensors));
  return aliases;
}

Tensors flattened(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& tensors : lists) all.insert(all.end(), tensors.begin(), tensors.end());
  return all;
}

int64_t bytes_of(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

// Gloo has no averages, so the sum is divided afterwards.
template <typename Options>
Options summing(const Options& options) {
  auto result = options;
  if (options.reduceOp == ReduceOp::AVG) result.reduceOp = ReduceOp(ReduceOp::SUM);
  return result;
}

class ProcessGroupNccl final : public c10d::Backend {
 public:
  ProcessGroupNccl(intrusive_ptr<c10d::Backend> gloo, intrusive_ptr<c10d::Store> store, int rank, int size,
                   py::object options)
      : Backend(rank, size),
        gloo_(std::move(gloo)),
        store_(std::move(store)),
        name_(py::str(options.attr("group_name")).cast<std::string>()),
        members_(options.attr("global_ranks_in_group").cast<std::vector<uint64_t>>()),
        options_(std::move(options)) {
    // Torch leaves the list of the default group empty.
    for (int member = 0; members_.size() < static_cast<size_t>(size); ++member) members_.push_back(member);
  }
  ~ProcessGroupNccl() override {
    const py::gil_scoped_acquire gil;
    options_ = py::object();
  }

  py::object options() const { return options_; }

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }

  void startCoalescing() override { batch_ = c10::make_intrusive<NcclWork>(); }
  intrusive_ptr<Work> endCoalescing() override {
    auto batch = std::move(batch_);
    batch_ = nullptr;
    return batch;
  }

  intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = aliases_of(tensors);
    const bool is_root = options.rootRank == getRank();
    Launch launch{"broadcast", is_root ? tensors : Tensors{}, is_root ? Tensors{} : tensors};
    return begin(launch, tensors, [&] { return gloo_->broadcast(host, options); });
  }

  intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = aliases_of(tensors);
    return begin({"allreduce", {}, tensors, kNoPeer, division(options.reduceOp, host)}, tensors,
                 [&] { return gloo_->allreduce(host, summing(options)); });
  }

  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    c10d::AllreduceOptions single;
    single.reduceOp = options.reduceOp;
    single.timeout = options.timeout;
    return batch_of(tensors.size(), [&](size_t index) {
      Tensors one{tensors[index]};
      return allreduce(one, single);
    });
  }

  intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = aliases_of(tensors);
    return begin({"reduce", {}, tensors, kNoPeer, division(options.reduceOp, host)}, tensors,
                 [&] { return gloo_->reduce(host, summing(options)); });
  }

  intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& options) override {
    auto host_outputs = aliases_of(outputs);
    auto host_inputs = aliases_of(inputs);
    const auto results = flattened(outputs);
    return begin({"allgather", inputs, results}, results,
                 [&] { return gloo_->allgather(host_outputs, host_inputs, options); });
  }

  intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto host_output = owning_host_alias(output), host_input = owning_host_alias(input);
    return begin({"allgather", {input}, {output}}, {output},
                 [&] { return gloo_->_allgather_base(host_output, host_input, options); });
  }

  intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) override {
    return batch_of(outputs.size(),
                    [&](size_t index) { return _allgather_base(outputs[index], inputs[index], options); });
  }

  intrusive_ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ReduceScatterOptions& options) override {
    auto host_outputs = aliases_of(outputs);
    auto host_inputs = aliases_of(inputs);
    return begin({"reduce_scatter", flattened(inputs), outputs, kNoPeer, division(options.reduceOp, host_outputs)},
                 outputs, [&] { return gloo_->reduce_scatter(host_outputs, host_inputs, summing(options)); });
  }

  intrusive_ptr<Work> _reduce_scatter_base(Tensor& output, Tensor& input,
                                           const c10d::ReduceScatterOptions& options) override {
    auto host_output = owning_host_alias(output), host_input = owning_host_alias(input);
    return begin({"reduce_scatter", {input}, {output}, kNoPeer, division(options.reduceOp, {host_output})}, {output},
                 [&] { return gloo_->_reduce_scatter_base(host_output, host_input, summing(options)); });
  }

  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& options) override {
    return batch_of(outputs.size(),
                    [&](size_t index) { return _reduce_scatter_base(outputs[index], inputs[index], options); });
  }

  intrusive_ptr<Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                                    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    auto host_output = owning_host_alias(output), host_input = owning_host_alias(input);
    return begin({"alltoall", {input}, {output}}, {output}, [&] {
      return gloo_->alltoall_base(host_output, host_input, output_splits, input_splits, options);
    });
  }

  intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto host_outputs = aliases_of(outputs), host_inputs = aliases_of(inputs);
    return begin({"alltoall", inputs, outputs}, outputs,
                 [&] { return gloo_->alltoall(host_outputs, host_inputs, options); });
  }

  intrusive_ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs,
                             const c10d::GatherOptions& options) override {
    auto host_outputs = aliases_of(outputs);
    auto host_inputs = aliases_of(inputs);
    const auto results = flattened(outputs);
    return begin({"gather", inputs, results}, results,
                 [&] { return gloo_->gather(host_outputs, host_inputs, options); });
  }

  intrusive_ptr<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                              const c10d::ScatterOptions& options) override {
    auto host_outputs = aliases_of(outputs);
    auto host_inputs = aliases_of(inputs);
    return begin({"scatter", flattened(inputs), outputs}, outputs,
                 [&] { return gloo_->scatter(host_outputs, host_inputs, options); });
  }

  intrusive_ptr<Work> send(Tensors& tensors, int target, int tag) override {
    auto host = aliases_of(tensors);
    return begin({"send", tensors, {}, target}, tensors, [&] { return gloo_->send(host, target, tag); });
  }

  intrusive_ptr<Work> recv(Tensors& tensors, int source, int tag) override {
    auto host = aliases_of(tensors);
    return begin({"recv", {}, tensors, source}, tensors, [&] { return gloo_->recv(host, source, tag); });
  }

  intrusive_ptr<Work> recvAnysource(Tensors&, int) override {
    TORCH_CHECK(false, "NCCL cannot receive from any source; name the sending rank");
  }

  intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    if (device_ < 0) device_ = options.device.has_value() ? options.device->index() : current_device();
    // NCCL reduces one number. The device of the group is the only option that matters here.
    c10d::BarrierOptions plain;
    plain.timeout = options.timeout;
    return begin({"barrier", {}, {}}, {}, [&] { return gloo_->barrier(plain); }, true);
  }

 private:
  template <typename Start>
  intrusive_ptr<Work> begin(const Launch& launch, const Tensors& results, Start start, bool blocks_host = false) {
    for (const auto* tensors : {&launch.reads, &launch.writes})
      for (const auto& tensor : *tensors) check(tensor, launch.operation);
    const auto stream = stream_for(launch);
    timeline::stream_waits(stream, timeline::end_of(timeline::current_stream(stream.device)));
    const auto moment = timeline::launch(stream);
    for (const auto& tensor : launch.reads) note_read(tensor, moment, launch.operation);
    for (const auto& tensor : launch.writes) note_write(tensor, moment, launch.operation);
    for (const auto& tensor : results) protect(tensor, stream);
    for (const auto& tensor : launch.reads) protect(tensor, stream);

    auto work = batch_ ? batch_ : c10::make_intrusive<NcclWork>(blocks_host);
    if (launch.peer != kNoPeer) work->has_futures = false;
    const int64_t bytes = bytes_of(launch.reads.empty() ? launch.writes : launch.reads);
    nccl::add_to_trace({"launch", work->number, name_, members_, launch.operation, launch.peer, bytes,
                  batch_ ? work->number : kNoBatch});
    report(kNccl, std::string(launch.operation) + " in group " + name_, bytes);
    work->add(start(), results, launch.epilogue, stream);
    return work;
  }

  template <typename Member>
  intrusive_ptr<Work> batch_of(size_t size, Member member) {
    const bool is_nested = batch_ != nullptr;
    if (!is_nested) startCoalescing();
    for (size_t index = 0; index < size; ++index) member(index);
    return is_nested ? intrusive_ptr<Work>(batch_) : endCoalescing();
  }

  void check(const Tensor& tensor, const char* operation) {
    TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type ", tensor.device().type(),
                ": NCCL cannot ", operation, " a tensor on ", tensor.device());
    TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous: NCCL ", operation, " of shape ",
                tensor.sizes(), " and strides ", tensor.strides());
    const auto dtype = tensor.scalar_type();
    TORCH_CHECK(dtype != at::kShort && dtype != at::kUInt16 && !at::isComplexType(dtype),
                "Input tensor data type is not supported for NCCL process group: ", dtype);
    if (device_ < 0) claim_device(tensor.device().index());
    TORCH_CHECK(device_ == tensor.device().index(), "NCCL group ", name_, " uses cuda:", static_cast<int>(device_),
                ", but ", operation, " got a tensor on ", tensor.device());
  }

  // NCCL refuses two ranks on one device.
  void claim_device(c10::DeviceIndex device) {
    const char* node = std::getenv("GROUP_RANK");
    const auto text = std::string(node == nullptr ? "0" : node) + ":" + std::to_string(physical_device(device));
    const auto key = [](int rank) { return "rehearsal_device_" + std::to_string(rank); };
    const std::vector<uint8_t> place(text.begin(), text.end());
    store_->set(key(getRank()), place);
    for (int rank = 0; rank < getSize(); ++rank)
      TORCH_CHECK(rank == getRank() || !store_->check({key(rank)}) || store_->get(key(rank)) != place,
                  "Duplicate GPU detected: rank ", rank, " and rank ", getRank(), " of NCCL group ", name_,
                  " both use device ", text, " (node:device)");
    device_ = device;
  }

  // Single messages use a communicator of the two ranks, everything else one of the whole group.
  StreamId stream_for(const Launch& launch) {
    if (device_ < 0) device_ = current_device();
    const int peer = batch_ ? kNoPeer : launch.peer;
    const auto [place, is_new] = streams_.try_emplace(peer);
    if (is_new) place->second = timeline::new_stream(device_);
    return place->second;
  }

  std::function<void()> division(const ReduceOp& operation, Tensors host) const {
    if (operation != ReduceOp::AVG) return nullptr;
    return [host = std::move(host), size = getSize()]() mutable {
      for (auto& tensor : host) tensor.div_(size);
    };
  }

  intrusive_ptr<c10d::Backend> gloo_;
  intrusive_ptr<c10d::Store> store_;
  std::string name_;
  std::vector<uint64_t> members_;
  std::map<int, StreamId> streams_;
  intrusive_ptr<NcclWork> batch_;
  c10::DeviceIndex device_ = -1;
  py::object options_;
};

intrusive_ptr<ProcessGroupNccl> make_group(py::object store, int rank, int size, py::object options) {
  const auto c10d_module = py::module_::import("torch._C._distributed_c10d");
  const auto own_store = c10d_module.attr("PrefixStore")("rehearsal", store);
  const auto gloo = c10d_module.attr("ProcessGroupGloo")(own_store, rank, size, options.attr("_timeout"));
  return c10::make_intrusive<ProcessGroupNccl>(
      gloo.cast<intrusive_ptr<c10d::Backend>>(), own_store.cast<intrusive_ptr<c10d::Store>>(), rank, size,
      std::move(options));
}

void change_timeout(ProcessGroupNccl& group, const py::object& timeout) {
  group.options().attr("_timeout") = timeout;
  group.setTimeout(timeout.cast<std::chrono::milliseconds>());
}

}  // namespace

void bind_process_group(py::module_& module) {
  py::module_::import("torch._C._distributed_c10d");
  const auto nothing = [](ProcessGroupNccl&) {};
  py::class_<ProcessGroupNccl, intrusive_ptr<ProcessGroupNccl>, c10d::Backend>(
      module, "ProcessGroupNCCL")
      .def(py::init(&make_group))
      .def_property_readonly("options", &ProcessGroupNccl::options)
      .def("set_timeout", &change_timeout)
      .def("_set_default_timeout", &change_timeout)
      .def("_shutdown", nothing)
      .def("shutdown", nothing)
      .def("abort", nothing)
      .def("_group_start", nothing)
      .def("_group_end", nothing)
      .def("_is_initialized", [](ProcessGroupNccl&) { return true; });
  module.def("set_tracing", [](bool on) { nccl::is_tracing = on; });
  module.def("take_trace", &take_trace);
}

}  // namespace rehearsal

// DistributedDataParallel times its steps with a timer of the device.
namespace c10d {
namespace {

class StepTimer final : public Timer {
 public:
  explicit StepTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, StepTimer)

}  // namespace
}  // namespace c10d
