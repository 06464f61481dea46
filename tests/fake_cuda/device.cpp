// A CUDA device for fake tensors: what PyTorch's C++ asks of a device during a backward pass, answered without a driver.
//
// The CUDA build's own answers need a driver. enter() puts these in their place, leave() puts PyTorch's back.
// Two devices, of which the first is current.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using namespace c10;

struct Hooks final : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 2; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  long versionCuDNN() const override { return 90000; }
  long versionRuntimeCuDNN() const override { return 90000; }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Device first() { return Device(DeviceType::CUDA, 0); }
  static Stream stream(Device device) { return Stream(Stream::DEFAULT, device.has_index() ? device : first()); }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return first(); }
  Device getDevice() const override { return first(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device device) const noexcept override { return stream(device); }
  Stream getDefaultStream(Device device) const override { return stream(device); }
  Stream exchangeStream(Stream to) const noexcept override { return stream(to.device()); }
  DeviceIndex deviceCount() const noexcept override { return 2; }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override { *event = (void*)1; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};

Hooks hooks;
Guard guard;
const c10::impl::DeviceGuardImplInterface* torchs_guard = nullptr;
void* torchs_hooks = nullptr;

// An object's first word says which functions it has.
void*& functions(const at::CUDAHooksInterface& object) {
  return *reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&object));
}

std::atomic<const c10::impl::DeviceGuardImplInterface*>& registered_guard() {
  return c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)];
}

}  // namespace

extern "C" void enter() {
  torchs_guard = registered_guard().exchange(&guard);
  torchs_hooks = functions(at::detail::getCUDAHooks());
  functions(at::detail::getCUDAHooks()) = functions(hooks);
}

extern "C" void leave() {
  registered_guard().store(torchs_guard);
  functions(at::detail::getCUDAHooks()) = torchs_hooks;
}
