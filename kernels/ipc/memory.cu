// Memory of a GPU that other processes of the host map: CUDA's own calls, which know nothing of torch's allocator.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "on_device.cuh"

namespace {

// Where the allocation of this device's that an address lies in begins, and how long it is, whoever made it.
cudaError_t range_of(unsigned long long address, unsigned long long* base, size_t* size) {
  using AddressRange = int (*)(unsigned long long*, size_t*, unsigned long long);
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &found, 12000, cudaEnableDefault, &result);
  if (status != cudaSuccess) return status;
  if (result != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
  return reinterpret_cast<AddressRange>(found)(base, size, address) == 0 ? cudaSuccess : cudaErrorInvalidDevicePointer;
}

}  // namespace

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

// The handle of the whole allocation that an address lies in, whoever made it, and how far into it the address is.
extern "C" int antiphon_ipc_export(int device, uint64_t address, void* handle, uint64_t* offset, uint64_t* left) {
  return antiphon::on(device, [=] {
    unsigned long long base = 0;
    size_t size = 0;
    cudaError_t status = range_of(address, &base, &size);
    if (status != cudaSuccess) return status;
    cudaIpcMemHandle_t made{};
    status = cudaIpcGetMemHandle(&made, reinterpret_cast<void*>(base));
    if (status != cudaSuccess) return status;
    std::memcpy(handle, &made, sizeof made);
    *offset = address - base;
    *left = size - *offset;
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

// How many bytes follow the address in its allocation; of an opened one these are all that may be written.
extern "C" int antiphon_ipc_size(int device, uint64_t address, uint64_t* left) {
  return antiphon::on(device, [=] {
    unsigned long long base = 0;
    size_t size = 0;
    const cudaError_t status = range_of(address, &base, &size);
    if (status == cudaSuccess) *left = size - (address - base);
    return status;
  });
}

extern "C" int antiphon_ipc_close(int device, void* address) {
  return antiphon::on(device, [=] { return cudaIpcCloseMemHandle(address); });
}

extern "C" int antiphon_ipc_free(int device, void* address) {
  return antiphon::on(device, [=] { return cudaFree(address); });
}

extern "C" const char* antiphon_ipc_reason(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
