// Streams and events of the copies between GPUs. A copy is one call from the host: wait, launch, record.

#include <cstdint>
#include <vector>

#include "on_device.cuh"
#include "page_rows.cuh"

extern "C" int antiphon_run_copy(const int64_t* rows, int count, int blocks, void* stream);
extern "C" int antiphon_run_copy_load();

// Ahead of the model's steps: a copy is short, and a peer waits for it. The kernels are loaded here, because that may
// have to wait for whatever runs.
extern "C" int antiphon_copy_stream_make(int device, void** stream) {
  return antiphon::on(device, [=] {
    int least = 0, greatest = 0;
    cudaError_t status = static_cast<cudaError_t>(antiphon_run_copy_load());
    if (status == cudaSuccess) status = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (status != cudaSuccess) return status;
    return cudaStreamCreateWithPriority(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking, greatest);
  });
}

extern "C" int antiphon_copy_event_make(int device, void** event) {
  return antiphon::on(device, [=] {
    return cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventDisableTiming);
  });
}

// parts, bad: see page_rows.cuh. -1 if there is a run that may not be copied, and nothing is begun. lane: a stream of
// antiphon_copy_stream_make. after: an event of this device that was recorded, or null. done: an event that nothing
// waits for any more.
extern "C" int antiphon_copy_pages(int device, const antiphon::Part* parts, int count, int blocks, void* lane,
                                   void* after, void* done, antiphon::BadRun* bad) {
  static thread_local std::vector<int64_t> rows;
  const size_t words = 3 * antiphon::count_runs(parts, count);
  if (rows.size() < words) rows.resize(words);
  const int64_t made = antiphon::page_rows(parts, count, rows.data(), bad);
  if (made < 0) return -1;
  return antiphon::on(device, [=] {
    cudaError_t status = cudaSuccess;
    if (after != nullptr) {
      status = cudaStreamWaitEvent(static_cast<cudaStream_t>(lane), static_cast<cudaEvent_t>(after), 0);
    }
    if (status == cudaSuccess) {
      status = static_cast<cudaError_t>(antiphon_run_copy(rows.data(), static_cast<int>(made), blocks, lane));
    }
    // Also after a failure: of a long list, some may have been launched.
    const cudaError_t recorded = cudaEventRecord(static_cast<cudaEvent_t>(done), static_cast<cudaStream_t>(lane));
    return status == cudaSuccess ? recorded : status;
  });
}

// cudaSuccess when it is over, cudaErrorNotReady while it is not, or what ended the device's work.
extern "C" int antiphon_copy_state(void* done) {
  const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(done));
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}
