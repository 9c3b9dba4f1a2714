#include "tensor/cuda/cudnn/graph.h"

#include <cudnn_graph.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "tensor/cuda/cudnn/cudnn_functions.h"

namespace sherd::tensor::SHERD_CUDA::cudnn {

static_assert(fp32 == CUDNN_DATA_FLOAT);

void check(Enum code, const char* what) {
  const auto status = static_cast<cudnnStatus_t>(code);
  if (status == CUDNN_STATUS_SUCCESS) [[likely]]
    return;
  char details[512] = "";
  cudnnGetLastErrorString(details, sizeof details);
  fail(status == CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED ? ErrorKind::memory : ErrorKind::io,
       "cuDNN could not ", what, ": ", cudnnGetErrorString(status), details[0] ? ". " : "", details);
}

Descriptor::Descriptor(Enum type) {
  check(cudnnBackendCreateDescriptor(static_cast<cudnnBackendDescriptorType_t>(type), &raw_),
        "create a descriptor");
}

Descriptor::~Descriptor() {
  if (raw_) cudnnBackendDestroyDescriptor(raw_);
}

void Descriptor::set(Enum name, Enum type, std::int64_t count, const void* values) {
  check(cudnnBackendSetAttribute(raw_, static_cast<cudnnBackendAttributeName_t>(name),
                                 static_cast<cudnnBackendAttributeType_t>(type), count, values),
        "describe a graph");
}
void Descriptor::set(Enum name, const Descriptor& other) {
  set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &other.raw_);
}

void Descriptor::finalize() {
  check(cudnnBackendFinalize(raw_), "take a graph");
}

Extents4 dense(const Extents4& extents) {
  Extents4 strides(extents.size(), 1);
  for (std::size_t axis = extents.size() - 1; axis > 0; --axis)
    strides[axis - 1] = strides[axis] * extents[axis];
  return strides;
}

GraphTensor OperationGraph::tensor(Enum dtype, const Extents4& extents, const Extents4& strides, Kind kind,
                                   std::int64_t id) {
  auto made = std::make_shared<Descriptor>(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  const auto count = static_cast<std::int64_t>(extents.size());
  const std::int64_t alignment = 16, name = id ? id : next_id_++;
  made->set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, dtype);
  made->set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, count, extents.data());
  made->set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, count, strides.data());
  made->set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, name);
  made->set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, alignment);
  if (kind == Kind::between) made->set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, true);
  if (kind == Kind::by_value) made->set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, true);
  made->finalize();
  tensors_.push_back(made);
  return {std::move(made), extents, strides};
}

void OperationGraph::matmul(const GraphTensor& a, const GraphTensor& b, const GraphTensor& c) {
  Descriptor kind(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  kind.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  kind.finalize();
  Descriptor operation(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, *a.descriptor);
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, *b.descriptor);
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, *c.descriptor);
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_DESC, kind);
  operation.finalize();
  operations_.push_back(std::move(operation)), kinds_.push_back(std::move(kind));
}

void OperationGraph::pointwise_into(const GraphTensor& y, Enum mode, const GraphTensor& x,
                                    const GraphTensor* b, const GraphTensor* t, Enum compute,
                                    std::int64_t axis) {
  Descriptor kind(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  kind.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode);
  kind.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, compute);
  if (axis >= 0) kind.set(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, axis);
  kind.finalize();
  Descriptor operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kind);
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, *x.descriptor);
  if (b) operation.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, *b->descriptor);
  if (t) operation.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, *t->descriptor);
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, *y.descriptor);
  operation.finalize();
  operations_.push_back(std::move(operation)), kinds_.push_back(std::move(kind));
}

GraphTensor OperationGraph::pointwise(Enum mode, const GraphTensor& x, const GraphTensor& b) {
  GraphTensor y = between(x.extents);
  pointwise_into(y, mode, x, &b);
  return y;
}

GraphTensor OperationGraph::pointwise(Enum mode, const GraphTensor& x) {
  GraphTensor y = between(x.extents);
  pointwise_into(y, mode, x);
  return y;
}

GraphTensor OperationGraph::index(const GraphTensor& x, std::int64_t axis) {
  GraphTensor y = between(x.extents, CUDNN_DATA_INT32);
  pointwise_into(y, CUDNN_POINTWISE_GEN_INDEX, x, nullptr, nullptr, CUDNN_DATA_FLOAT, axis);
  return y;
}

void OperationGraph::reduce(Enum op, const GraphTensor& x, const GraphTensor& y) {
  Descriptor kind(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  kind.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, op);
  kind.set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  kind.finalize();
  Descriptor operation(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, *x.descriptor);
  operation.set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, *y.descriptor);
  operation.set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, kind);
  operation.finalize();
  operations_.push_back(std::move(operation)), kinds_.push_back(std::move(kind));
}

void OperationGraph::view(const GraphTensor& x, const GraphTensor& y) {
  Descriptor operation(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, *x.descriptor);
  operation.set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, *y.descriptor);
  operation.finalize();
  operations_.push_back(std::move(operation));
}

namespace {

Descriptor graph_of(cudnnHandle_t handle, const OperationGraph& graph) {
  std::vector<cudnnBackendDescriptor_t> operations;
  for (const Descriptor& operation : graph.operations()) operations.push_back(operation.raw());
  Descriptor made(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  made.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle);
  made.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
           static_cast<std::int64_t>(operations.size()), operations.data());
  made.finalize();
  return made;
}

/// The heuristic's proposals, best first.
std::vector<Descriptor> proposals(const Descriptor& graph, cudnnBackendHeurMode_t mode) {
  Descriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode);
  heuristic.finalize();
  std::int64_t count = 0;
  check(cudnnBackendGetAttribute(heuristic.raw(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                 CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr),
        "count its proposals");
  std::vector<Descriptor> made;
  std::vector<cudnnBackendDescriptor_t> raw;
  for (std::int64_t i = 0; i < count; ++i)
    raw.push_back(made.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR).raw());
  if (count > 0)
    check(cudnnBackendGetAttribute(heuristic.raw(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                   CUDNN_TYPE_BACKEND_DESCRIPTOR, count, &count, raw.data()),
          "name its proposals");
  made.erase(made.begin() + count, made.end());
  return made;
}

/// Whether the configuration's engine says that its results do not repeat.
bool wavers(const Descriptor& configuration) {
  const Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t raw = engine.raw();
  std::int64_t count = 0;
  check(cudnnBackendGetAttribute(configuration.raw(), CUDNN_ATTR_ENGINECFG_ENGINE,
                                 CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &raw),
        "name an engine");
  cudnnBackendNumericalNote_t notes[CUDNN_NUMERICAL_NOTE_TYPE_COUNT] = {};
  check(cudnnBackendGetAttribute(engine.raw(), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                 CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &count, notes),
        "describe an engine");
  return std::find(notes, notes + count, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) != notes + count;
}

}  // namespace

ExecutionPlan::ExecutionPlan(cudnnHandle_t handle, OperationGraph graph, bool deterministic)
    : parts_(std::move(graph)), graph_(graph_of(handle, parts_)) {
  for (const auto mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK})
    for (const Descriptor& configuration : proposals(graph_, mode))
      if (build(handle, configuration, deterministic)) return;
  fail(ErrorKind::io, "cuDNN has no ", deterministic ? "repeatable " : "", "kernel for this graph");
}

bool ExecutionPlan::build(cudnnHandle_t handle, const Descriptor& configuration, bool deterministic) {
  if (deterministic && wavers(configuration)) return false;
  auto plan = std::make_unique<Descriptor>(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  plan->set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle);
  plan->set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration);
  if (cudnnBackendFinalize(plan->raw()) != CUDNN_STATUS_SUCCESS)
    return false;  // not for this device: the next one
  std::int64_t bytes = 0, count = 0;
  check(cudnnBackendGetAttribute(plan->raw(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                                 &count, &bytes),
        "size a plan");
  plan_ = std::move(plan), workspace_ = static_cast<std::size_t>(bytes);
  return true;
}

void ExecutionPlan::run(cudnnHandle_t handle, const std::vector<std::int64_t>& ids,
                        const std::vector<void*>& memory, void* workspace) const {
  Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  const auto count = static_cast<std::int64_t>(ids.size());
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, ids.data());
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, memory.data());
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace);
  pack.finalize();
  check(cudnnBackendExecute(handle, plan_->raw(), pack.raw()), "run a plan");
}

}  // namespace sherd::tensor::SHERD_CUDA::cudnn
