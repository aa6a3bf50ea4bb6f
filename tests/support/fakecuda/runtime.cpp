// The part of the CUDA runtime that PyTorch calls, for machines without a GPU. README.md has the theory of operation.
//
// Device memory is address space that nothing may touch: the host crashes on it, as on a GPU's. It holds no values, and
// what is copied from it is zero. Kernels are counted and compute nothing, and every stream is always idle: what was
// launched has happened. Events carry the host's clock. While a thread records a graph, what it launches on that stream
// is counted for the graph; what CUDA would refuse then fails, and the recording with it.

#include "fakecuda.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#if CUDART_VERSION >= 13000
#define FAKECUDA_CAPTURE_INFO "cudaStreamGetCaptureInfo"
#else
#define FAKECUDA_CAPTURE_INFO "cudaStreamGetCaptureInfo_v2"
#endif

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGuard = 2 << 20;  // so that no two allocations touch, as on a device
constexpr int kHost = -1;
constexpr int kPinned = -2;  // memory of the host that a device copies from by itself
constexpr int kMultiprocessors = 132;
constexpr int kRuntimeVersion = CUDART_VERSION;

long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

size_t device_bytes() { return setting("FAKE_CUDA_BYTES", 80L << 30); }

// As many as FAKE_CUDA_DEVICES says, but no more than CUDA_VISIBLE_DEVICES names.
int num_devices() {
  long count = setting("FAKE_CUDA_DEVICES", 2);
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return count;
  long named = *visible ? 1 : 0;
  for (; *visible; visible++) named += *visible == ',';
  return named < count ? named : count;
}

struct Block {
  size_t bytes;
  int device;
};

// Every allocation by address, and the bytes in use per device. Freed at exit by the system.
struct Memory {
  std::mutex mutex;
  std::map<char*, Block> blocks;
  std::unordered_map<int, size_t> used;
};

Memory& memory() {
  static auto* instance = new Memory;
  return *instance;
}

// The device whose memory a pointer points to, kPinned, or kHost.
int device_of(const void* pointer) {
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  auto block = m.blocks.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  if (block == m.blocks.begin()) return kHost;
  --block;
  return static_cast<const char*>(pointer) < block->first + block->second.bytes ? block->second.device : kHost;
}

bool is_on_device(const void* pointer) { return device_of(pointer) >= 0; }

thread_local int current_device = 0;
std::atomic<long> next_handle{0x1000};
std::atomic<long> num_launches{0}, num_waits{0}, num_allocations{0}, num_slow_uploads{0}, num_graph_launches{0};

struct Launch {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local Launch pending;  // between <<<...>>> and the launch

template <class Handle>
cudaError_t make_handle(Handle* handle) {
  *handle = reinterpret_cast<Handle>(next_handle += 16);
  return cudaSuccess;
}

struct Events {
  std::mutex mutex;
  std::unordered_map<cudaEvent_t, double> milliseconds;
};

Events& events() {
  static auto* instance = new Events;
  return *instance;
}

struct Graph {
  size_t kernels = 0;
  std::vector<cudaEvent_t> events;  // recorded at every launch, in this order
};

// The one that this thread records, if it records any.
struct Recording {
  cudaStream_t stream = nullptr;
  Graph* graph = nullptr;
  bool failed = false;
};
thread_local Recording recording;
std::atomic<unsigned long long> num_recordings{0};

bool is_recording(cudaStream_t stream) { return recording.graph && stream == recording.stream; }

// Which makes the end of the recording fail too, as on a device.
cudaError_t refused_by_recording(cudaError_t error) {
  recording.failed = true;
  return error;
}

cudaError_t waited() {
  if (recording.graph) return refused_by_recording(cudaErrorStreamCaptureUnsupported);
  num_waits++;
  return cudaSuccess;
}

cudaError_t launched(cudaStream_t stream) {
  if (is_recording(stream))
    recording.graph->kernels++;
  else if (recording.graph && !stream)
    return refused_by_recording(cudaErrorStreamCaptureImplicit);
  else
    num_launches++;
  return cudaSuccess;
}

void record_now(cudaEvent_t event) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  std::lock_guard<std::mutex> lock(events().mutex);
  events().milliseconds[event] = now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

}  // namespace

int fakecuda_device() { return current_device; }
void fakecuda_count_launch(void* stream) { launched(static_cast<cudaStream_t>(stream)); }
void fakecuda_count_launch() { launched(recording.stream); }  // of a library whose stream is not known

void fakecuda_refuse(const char* name) {
  fprintf(stderr, "fakecuda: %s was called, and tests/support/fakecuda does not implement it\n", name);
  abort();
}

// For tests, by ctypes, since the process began: kernels and graphs launched, graphs among these, waits of the host for
// the device, allocations of a device's memory.
FAKECUDA_API long fakecuda_launches() { return num_launches; }
FAKECUDA_API long fakecuda_graph_launches() { return num_graph_launches; }
FAKECUDA_API long fakecuda_waits() { return num_waits; }
FAKECUDA_API long fakecuda_allocations() { return num_allocations; }

// Copies to a device from memory that is not pinned: the host takes part in them, and may wait.
FAKECUDA_API long fakecuda_slow_uploads() { return num_slow_uploads; }

// Devices

FAKECUDA_API cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_devices();
  return *count ? cudaSuccess : cudaErrorNoDevice;
}

FAKECUDA_API cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices()) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}

// Ten times the compute capability of a device: the entry of FAKE_CUDA_CAPABILITIES at its number, or the last one.
static int capability(int device) {
  const char* text = getenv("FAKE_CUDA_CAPABILITIES");
  if (!text || !*text) return 90;
  for (; device > 0 && strchr(text, ','); device--) text = strchr(text, ',') + 1;
  return atoi(text);
}

// The figures of an H100 (CUDA C++ Programming Guide, "Compute Capabilities", 9.0), as far as PyTorch asks for them.
FAKECUDA_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Fake H100");
  p->major = capability(device) / 10;
  p->minor = capability(device) % 10;
  p->totalGlobalMem = device_bytes();
  p->multiProcessorCount = kMultiprocessors;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = 50 << 20;
  p->textureAlignment = 512;
  p->canMapHostMemory = p->unifiedAddressing = 1;
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, device);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = p.sharedMemPerMultiprocessor; break;
    default: *value = 0;  // a feature that this device lacks
  }
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kRuntimeVersion;
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = kRuntimeVersion;
  return cudaSuccess;
}

FAKECUDA_API const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  return error ? "an error of the fake CUDA runtime" : "no error";
}

FAKECUDA_API const char* cudaGetErrorName(cudaError_t error) {
  return error ? "cudaErrorOfTheFakeRuntime" : "cudaSuccess";
}

// Memory

FAKECUDA_API cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  bytes = (bytes + kPage - 1) / kPage * kPage;
  if (m.used[current_device] + bytes > device_bytes()) return cudaErrorMemoryAllocation;
  void* p = mmap(nullptr, bytes + kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return cudaErrorMemoryAllocation;
  m.blocks[static_cast<char*>(p)] = {bytes, current_device};
  m.used[current_device] += bytes;
  num_allocations++;
  *pointer = p;
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  auto block = m.blocks.find(static_cast<char*>(pointer));
  if (block == m.blocks.end()) return cudaErrorInvalidValue;
  m.used[block->second.device] -= block->second.bytes;
  munmap(pointer, block->second.bytes + kGuard);
  m.blocks.erase(block);
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  *total_bytes = device_bytes();
  *free_bytes = *total_bytes - m.used[current_device];
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  bytes = bytes ? bytes : 1;
  if (posix_memalign(pointer, kPage, bytes)) return cudaErrorMemoryAllocation;
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  m.blocks[static_cast<char*>(*pointer)] = {bytes, kPinned};
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaFreeHost(void* pointer) {
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  m.blocks.erase(static_cast<char*>(pointer));
  free(pointer);
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->device = device_of(pointer);
  if (attributes->device < 0) {
    attributes->type = attributes->device == kPinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    attributes->hostPointer = const_cast<void*>(pointer);
    if (attributes->device == kPinned) attributes->device = current_device;
  } else {
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

// Nothing is written to a device, and what is read from one is zero.
FAKECUDA_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                         cudaStream_t stream) {
  // A graph would read or write the host's memory at every launch, long after its owner may have freed it.
  if (is_recording(stream) && !(is_on_device(to) && is_on_device(from)))
    return refused_by_recording(cudaErrorStreamCaptureUnsupported);
  if (is_on_device(to)) {
    num_slow_uploads += device_of(from) == kHost;
    return cudaSuccess;
  }
  if (is_on_device(from))
    memset(to, 0, bytes);
  else
    memmove(to, from, bytes);
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return waited();
}

FAKECUDA_API cudaError_t cudaMemcpyPeerAsync(void*, int, const void*, int, size_t, cudaStream_t) {
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                           size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++)
    cudaMemcpyAsync(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width,
                    kind, stream);
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }
FAKECUDA_API cudaError_t cudaMemset(void*, int, size_t) { return cudaSuccess; }

// Streams and events: everything that was launched is done

FAKECUDA_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return make_handle(stream); }
FAKECUDA_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return make_handle(stream);
}
FAKECUDA_API cudaError_t cudaStreamSynchronize(cudaStream_t) { return waited(); }
FAKECUDA_API cudaError_t cudaDeviceSynchronize() { return waited(); }

FAKECUDA_API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = is_recording(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// Its parameters after these differ between versions, and PyTorch asks for none of them.
extern "C" FAKECUDA_VISIBLE cudaError_t fakecuda_capture_info(cudaStream_t, cudaStreamCaptureStatus* status,
                                                              unsigned long long* id, ...)
    __asm__(FAKECUDA_CAPTURE_INFO);

cudaError_t fakecuda_capture_info(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, ...) {
  if (id) *id = is_recording(stream) ? num_recordings.load() : 0;
  return cudaStreamIsCapturing(stream, status);
}

FAKECUDA_API cudaError_t cudaEventCreate(cudaEvent_t* event) { return make_handle(event); }
FAKECUDA_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return make_handle(event); }
FAKECUDA_API cudaError_t cudaEventSynchronize(cudaEvent_t) { return waited(); }

// While a graph is recorded an event is part of it only if it is external; others order streams, and have no time.
FAKECUDA_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  bool is_external = flags & cudaEventRecordExternal;
  if (!is_recording(stream)) {
    if (is_external) return cudaErrorIllegalState;
    record_now(event);
  } else if (is_external) {
    recording.graph->events.push_back(event);
  }
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

FAKECUDA_API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  std::lock_guard<std::mutex> lock(events().mutex);
  if (!events().milliseconds.count(from) || !events().milliseconds.count(to)) return cudaErrorInvalidResourceHandle;
  *milliseconds = static_cast<float>(events().milliseconds[to] - events().milliseconds[from]);
  return cudaSuccess;
}

// Kernels

FAKECUDA_API cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launched(stream);
}
FAKECUDA_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  return launched(config->stream);
}
FAKECUDA_API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launched(stream);
}

FAKECUDA_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

FAKECUDA_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  pending = {grid, block, shared, stream};
  return 0;
}

FAKECUDA_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pending.grid;
  *block = pending.block;
  *shared = pending.shared;
  *static_cast<cudaStream_t*>(stream) = pending.stream;
  return cudaSuccess;
}

FAKECUDA_API void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}

FAKECUDA_API void __cudaRegisterFatBinaryEnd(void**) {}
FAKECUDA_API void __cudaUnregisterFatBinary(void**) {}
FAKECUDA_API char __cudaInitModule(void**) { return 1; }
FAKECUDA_API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*,
                                         int*) {}
FAKECUDA_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

FAKECUDA_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                               unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char symbol[1 << 16];
  *address = symbol;
  return cudaSuccess;
}

// Graphs: a recorded one and its executable form are the same here

FAKECUDA_API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (!stream || recording.graph) return cudaErrorStreamCaptureUnsupported;
  recording = {stream, new Graph, false};
  num_recordings++;
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  if (!is_recording(stream)) return cudaErrorIllegalState;
  *graph = reinterpret_cast<cudaGraph_t>(recording.failed ? nullptr : recording.graph);
  if (recording.failed) delete recording.graph;
  recording.graph = nullptr;
  return recording.failed ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

FAKECUDA_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                                       unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  if (recording.graph) return refused_by_recording(cudaErrorStreamCaptureUnsupported);
  num_launches++;
  num_graph_launches++;
  for (cudaEvent_t event : reinterpret_cast<Graph*>(executable)->events) record_now(event);
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  if (recording.graph) return refused_by_recording(cudaErrorStreamCaptureUnsupported);
  delete reinterpret_cast<Graph*>(executable);
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->kernels + reinterpret_cast<Graph*>(graph)->events.size();
  return cudaSuccess;
}

// Functions of the driver, by name

namespace {

constexpr int kMaxUnknown = 64;
char unknown_names[kMaxUnknown][64];
std::atomic<int> num_unknown{0};

template <int Number>
int unknown(...) {
  fakecuda_refuse(unknown_names[Number]);
}

int succeed(...) { return 0; }

template <int... Numbers>
auto make_unknown(std::integer_sequence<int, Numbers...>) {
  using Function = int (*)(...);
  static Function table[] = {unknown<Numbers>...};
  return table;
}

}  // namespace

// Each gets a function that aborts with its name when it is called.
static cudaError_t entry_point(const char* name, void** function, cudaDriverEntryPointQueryResult* result) {
  static auto* table = make_unknown(std::make_integer_sequence<int, kMaxUnknown>());
  if (result) *result = cudaDriverEntryPointSuccess;
  if (fakecuda_is_silent(name)) {
    *function = reinterpret_cast<void*>(&succeed);
    return cudaSuccess;
  }
  int number = num_unknown++;
  if (number >= kMaxUnknown) fakecuda_refuse(name);
  snprintf(unknown_names[number], sizeof unknown_names[number], "%s", name);
  *function = reinterpret_cast<void*>(table[number]);
  return cudaSuccess;
}

FAKECUDA_API cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  return entry_point(name, function, result);
}

FAKECUDA_API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                          unsigned long long, cudaDriverEntryPointQueryResult* result) {
  return entry_point(name, function, result);
}
