// A device without a GPU, for tests: memory of its own kind in the memory of the host. Comes in: PyTorch's operators. Goes out: what
// the CPU makes of them. What must hold: as on a GPU, work is done in order, and a copy that does not block is garbage to the host
// until its event was waited for, and reads the host's memory late; what crosses between device and host is counted.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

namespace {

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;
constexpr DeviceType KIND = DeviceType::PrivateUse1;

// What crosses, in bytes, and how often the host had to wait, also in threads that are not the engine's. Copies that the fallback
// makes are the device's own work.
std::atomic<int64_t> to_host{0}, to_device{0}, copies{0}, waits{0}, foreign{0};
thread_local bool at_work = false;

struct Copy {
  int64_t number;
  at::Tensor source, target;  // views of the CPU; the source of one to the host is a snapshot
  bool up;
};

std::mutex lock;
std::deque<Copy> queue;
int64_t enqueued = 0;

at::Tensor view(const at::Tensor& t) {
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [keep = t.storage()](void*) {}, t.options().device(at::kCPU));
}

// Under the lock nobody asks for the interpreter, whose holder may be waiting for the lock. The second reference to a tensor that
// Python knows, and the last one, do: tensors are put into a `Copy`, returned and let go without it.

// Does what is due, in order.
template <class Due>
void work_off(Due due) {
  std::vector<Copy> done;
  std::lock_guard guard(lock);
  std::deque<Copy> rest;
  for (auto& copy : queue) {
    if (!due(copy)) { rest.push_back(std::move(copy)); continue; }
    copy.target.copy_(copy.source);
    done.push_back(std::move(copy));
  }
  queue = std::move(rest);
}

// What was sent to the device is there before anything else happens on it.
void arrive() {
  work_off([](const Copy& copy) { return copy.up; });
}

// Whether this thread is one of the engine's.
bool is_engine() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::strncmp(name, "redsync", 7) == 0;
}

void wait_for(int64_t number) {
  bool pending = false;
  work_off([&](const Copy& copy) {
    bool due = copy.up || copy.number <= number;
    pending |= due && copy.number <= number;
    return due;
  });
  waits += pending;
  foreign += pending && !is_engine();
}

int64_t last() {
  std::lock_guard guard(lock);
  return enqueued;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool down = !from.is_cpu() && to.is_cpu(), up = from.is_cpu() && !to.is_cpu();
  at::Tensor source = from.is_cpu() ? from : view(from), target = to.is_cpu() ? to : view(to);
  source = source.expand(target.sizes());
  if (at_work) {
    target.copy_(source);
    return to;
  }
  if (down) to_host += target.nbytes();
  if (up) to_device += target.nbytes();
  copies += down || up;
  if (non_blocking && (down || up)) {
    if (down) arrive();
    Copy copy{0, down ? source.clone() : source, target, up};
    {
      std::lock_guard guard(lock);
      copy.number = ++enqueued;
      queue.push_back(std::move(copy));
      if (down && target.is_contiguous()) std::memset(target.data_ptr(), 0xA5, target.nbytes());
    }
    return to;
  }
  if (down) wait_for(last()); else arrive();
  target.copy_(source);
  return to;
}

struct Memory final : c10::Allocator {
  static void release(void* p) { c10::free_cpu(p); }
  c10::DataPtr allocate(size_t bytes) override {
    void* p = c10::alloc_cpu(bytes);
    return {p, p, &release, Device(KIND, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

thread_local int64_t current = 0;
std::atomic<int64_t> streams{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Stream stream(int64_t id) { return Stream(Stream::UNSAFE, Device(KIND, 0), id); }
  DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device) const override { return {KIND, 0}; }
  Device getDevice() const override { return {KIND, 0}; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return stream(current); }
  Stream getDefaultStream(Device) const override { return stream(0); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(++streams); }
  Stream getNewStream(Device, int) const override { return stream(++streams); }
  Stream exchangeStream(Stream s) const override { return stream(std::exchange(current, s.id())); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<int64_t*>(event); }
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new int64_t;
    *static_cast<int64_t*>(*event) = last();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return false; }
  void synchronizeEvent(void* event) const override { wait_for(event ? *static_cast<int64_t*>(event) : 0); }
  bool queryStream(const Stream&) const override { return false; }
  void synchronizeStream(const Stream&) const override { wait_for(last()); }
  void synchronizeDevice(DeviceIndex) const override { wait_for(last()); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return {KIND, 0}; }
};

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<Device>,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type.value_or(at::kFloat), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<Device>, std::optional<bool>) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, type.value_or(at::kFloat));
}

const at::Tensor& resize(const at::Tensor& t, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  size_t bytes = c10::multiply_integers(size) * t.itemsize();
  auto storage = t.storage();
  if (storage.nbytes() < bytes) {
    storage.set_data_ptr_noswap(memory.allocate(bytes));
    storage.set_nbytes(bytes);
  }
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return t;
}

at::Tensor& set_part(at::Tensor& t, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  stride.empty() ? impl->set_sizes_contiguous(size) : impl->set_sizes_and_strides(size, stride);
  return t;
}

at::Tensor& set_all(at::Tensor& t, at::Storage storage) {
  int64_t elements = storage.nbytes() / t.itemsize();
  return set_part(t, std::move(storage), 0, {elements}, {});
}

at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) resize(to, from.sizes(), {});
  return copy_from(from, to, false);
}

at::Scalar scalar(const at::Tensor& t) {
  wait_for(last());
  to_host += at_work ? 0 : t.nbytes();
  return view(t).item();
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  arrive();
  bool before = std::exchange(at_work, true);
  struct Restore { bool b; ~Restore() { at_work = b; } } restore{before};
  at::native::cpu_fallback(op, stack);
}

at::Tensor as_view(const at::Tensor& t, c10::SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(scalar));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(as_view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage", TORCH_FN(set_all));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_part));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY(redsync_device, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("traffic() -> int[]", [] { return std::vector<int64_t>{to_host, to_device, copies, waits, foreign}; });
  m.def("reset() -> ()", [] { to_host = to_device = copies = waits = foreign = 0; });
}
