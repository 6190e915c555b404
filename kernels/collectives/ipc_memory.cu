// Memory of a GPU that other processes of the host map: CUDA's own calls, which know nothing of torch's allocator.
//
// Every call takes the device, and leaves the calling thread's as it was. A failure is returned, and not left behind for
// the next launch to find.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstring>

namespace antiphon {
namespace {

class OnDevice {
 public:
  explicit OnDevice(int device) : status_(cudaGetDevice(&before_)) {
    if (status_ == cudaSuccess) status_ = cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  cudaError_t status() const { return status_; }

 private:
  int before_ = 0;
  cudaError_t status_;
};

template <typename Call>
int on(int device, Call call) {
  const OnDevice here(device);
  const cudaError_t status = here.status() == cudaSuccess ? call() : here.status();
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

}  // namespace
}  // namespace antiphon

// Zeroed, and seen to be so, when it returns. The handle is sizeof(cudaIpcMemHandle_t) bytes.
extern "C" int antiphon_ipc_allocate(int device, size_t size_bytes, void** address, void* handle) {
  return antiphon::on(device, [=] {
    *address = nullptr;
    cudaIpcMemHandle_t made{};
    cudaError_t status = cudaMalloc(address, size_bytes);
    if (status != cudaSuccess) return status;
    status = cudaMemset(*address, 0, size_bytes);
    if (status == cudaSuccess) status = cudaDeviceSynchronize();
    if (status == cudaSuccess) status = cudaIpcGetMemHandle(&made, *address);
    if (status != cudaSuccess) {
      cudaFree(*address);
      *address = nullptr;
      return status;
    }
    std::memcpy(handle, &made, sizeof made);
    return cudaSuccess;
  });
}

// Maps what another process allocated, which this device then reads and writes over NVLink or PCIe.
extern "C" int antiphon_ipc_open(int device, const void* handle, void** address) {
  return antiphon::on(device, [=] {
    *address = nullptr;
    cudaIpcMemHandle_t theirs;
    std::memcpy(&theirs, handle, sizeof theirs);
    return cudaIpcOpenMemHandle(address, theirs, cudaIpcMemLazyEnablePeerAccess);
  });
}

extern "C" int antiphon_ipc_close(int device, void* address) {
  return antiphon::on(device, [=] { return cudaIpcCloseMemHandle(address); });
}

extern "C" int antiphon_ipc_free(int device, void* address) {
  return antiphon::on(device, [=] { return cudaFree(address); });
}

extern "C" const char* antiphon_ipc_reason(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
