// CUDA's runtime for a device that computes nothing. Memory is counted, and refused as on a card of NULLCUDA_GIB; it is
// reserved address space, so that what nobody touches takes no memory of this machine. Copies to and from the host are
// made, except the largest to the device; one to pinned memory only when something waits for it, until when its target
// is NaN. Kernels and waits are counted.

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <vector>

namespace {

const size_t GIB = size_t(1) << 30, GRANULARITY = 2 << 20;  // cudaMalloc gives multiples of 2 MiB
// No weight of the tests is larger. To time its kernels, Inductor restores larger buffers from the host over a hundred
// times.
const size_t LARGEST_WEIGHT = size_t(384) << 20;

double number(const char* variable, double otherwise) {
    const char* text = getenv(variable);
    return text ? atof(text) : otherwise;
}
int capability() { return int(number("NULLCUDA_SM", 90)); }
size_t total() { return size_t(number("NULLCUDA_GIB", 79.1) * GIB); }
size_t context() { return GIB / 2; }  // what CUDA itself takes of a card

struct Copy {
    void* to;
    const void* from;
    size_t bytes;
};
struct Device {
    std::mutex lock;
    std::vector<Copy> enqueued;  // copies to pinned memory
    std::map<char*, size_t> blocks, pinned;  // allocations on the device and of pinned memory: bytes
    size_t used = 0;
    long launches = 0, allocations = 0, to_host = 0, to_device = 0;
    std::atomic<long> waits{0}, event_waits{0};
};
Device& device() {  // never destroyed: kernels are registered before main, and torch frees memory after it
    static Device* only = new Device;
    return *only;
}

bool has(const std::map<char*, size_t>& allocations, const void* pointer) {
    char* place = (char*)pointer;
    auto next = allocations.upper_bound(place);
    if (next == allocations.begin()) return false;
    --next;
    return place < next->first + next->second;
}

bool is_pinned(const void* pointer) {
    std::lock_guard<std::mutex> guard(device().lock);
    return has(device().pinned, pointer);
}

void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    Device& d = device();
    {
        std::lock_guard<std::mutex> guard(d.lock);
        if (kind == cudaMemcpyDeviceToHost) d.to_host++;
        if (kind == cudaMemcpyHostToDevice) d.to_device++;
    }
    if (kind == cudaMemcpyDeviceToDevice && bytes > 65536) return;  // no kernel reads it
    if (kind == cudaMemcpyHostToDevice && bytes > LARGEST_WEIGHT) return;
    memcpy(to, from, bytes);
}

// Make the copies that are enqueued, whatever stream they are in.
void finish_copies() {
    Device& d = device();
    std::lock_guard<std::mutex> guard(d.lock);
    for (const Copy& each : d.enqueued) memcpy(each.to, each.from, each.bytes);
    d.enqueued.clear();
}

cudaError_t wait(std::atomic<long>& count) {
    count++;
    finish_copies();
    return cudaSuccess;
}

cudaError_t query() {
    Device& d = device();
    std::lock_guard<std::mutex> guard(d.lock);
    return d.enqueued.empty() ? cudaSuccess : cudaErrorNotReady;
}

thread_local int current = 0;
thread_local struct {
    dim3 grid, block;
    size_t shared;
    void* stream;
} configuration;

void fill(cudaDeviceProp* p, int index) {
    int sm = capability();
    bool is_hopper = sm >= 90;
    memset(p, 0, sizeof *p);
    strcpy(p->name, sm >= 100 ? "NVIDIA B200" : is_hopper ? "NVIDIA H100 80GB HBM3" : "NVIDIA A100-SXM4-40GB");
    p->totalGlobalMem = total();
    p->major = sm / 10, p->minor = sm % 10, p->multiProcessorCount = is_hopper ? 132 : 108;
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = is_hopper ? 232448 : 166912;
    p->sharedMemPerMultiprocessor = is_hopper ? 233472 : 167936;
    p->regsPerBlock = p->regsPerMultiprocessor = p->totalConstMem = 65536;
    p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64, p->maxBlocksPerMultiProcessor = 32;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->l2CacheSize = 52428800, p->memPitch = 2147483647, p->memoryBusWidth = 5120, p->textureAlignment = 512;
    p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = p->cooperativeLaunch = 1;
    p->clusterLaunch = p->memoryPoolsSupported = p->streamPrioritiesSupported = 1;
    p->pciBusID = index + 1, p->asyncEngineCount = 3;
}

int unknown_driver_function() { return 0; }

}  // namespace

extern "C" {

// For the tests

void null_count() {
    Device& d = device();
    std::lock_guard<std::mutex> guard(d.lock);
    d.launches++;
}

void null_reset() {
    Device& d = device();
    std::lock_guard<std::mutex> guard(d.lock);
    d.launches = d.allocations = d.to_host = d.to_device = d.waits = d.event_waits = 0;
}

// In the order of the fields of `Numbers` in device.py.
void null_numbers(long* n) {
    Device& d = device();
    std::lock_guard<std::mutex> guard(d.lock);
    n[0] = d.launches, n[1] = d.allocations, n[2] = d.to_host, n[3] = d.to_device, n[4] = d.waits, n[5] = d.event_waits;
}

// Devices

cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int* index) { *index = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int index) { current = index; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { *version = 13020; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = 13020; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int index) { fill(p, index); return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int index) {
    cudaDeviceProp p;
    fill(&p, index);
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(p.sharedMemPerBlock); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(p.sharedMemPerBlockOptin); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = int(p.sharedMemPerMultiprocessor); break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[1]; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    default: *value = 1;
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int index) {
    snprintf(text, size, "0000:%02x:00.0", index + 1);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0, *greatest = -5; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }

// Memory

cudaError_t cudaMemGetInfo(size_t* available, size_t* all) {
    Device& d = device();
    std::lock_guard<std::mutex> guard(d.lock);
    size_t taken = d.used + context();
    *all = total();
    *available = taken > *all ? 0 : *all - taken;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, size_t bytes) {
    Device& d = device();
    std::lock_guard<std::mutex> guard(d.lock);
    size_t rounded = (bytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    d.allocations++;
    *memory = nullptr;
    if (d.used + context() + rounded > total()) return cudaErrorMemoryAllocation;
    void* reserved = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) return cudaErrorMemoryAllocation;
    d.blocks[(char*)reserved] = rounded;
    d.used += rounded;
    *memory = reserved;
    return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
    finish_copies();
    Device& d = device();
    std::lock_guard<std::mutex> guard(d.lock);
    auto block = d.blocks.find((char*)memory);
    if (block == d.blocks.end()) return cudaSuccess;
    munmap(memory, block->second);
    d.used -= block->second;
    d.blocks.erase(block);
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t) { return cudaMalloc(memory, bytes); }
cudaError_t cudaFreeAsync(void* memory, cudaStream_t) { return cudaFree(memory); }
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
    Device& d = device();
    std::lock_guard<std::mutex> guard(d.lock);
    *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!*memory) return cudaErrorMemoryAllocation;
    d.pinned[(char*)*memory] = bytes;
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void** memory, size_t bytes) { return cudaHostAlloc(memory, bytes, 0); }
cudaError_t cudaFreeHost(void* memory) {
    finish_copies();
    Device& d = device();
    std::lock_guard<std::mutex> guard(d.lock);
    auto block = d.pinned.find((char*)memory);
    if (block == d.pinned.end()) return cudaSuccess;
    d.pinned.erase(block);
    free(memory);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned) {
    Device& d = device();
    std::lock_guard<std::mutex> guard(d.lock);
    d.pinned[(char*)memory] = bytes;
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    Device& d = device();
    std::lock_guard<std::mutex> guard(d.lock);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = has(d.blocks, pointer)   ? cudaMemoryTypeDevice
                       : has(d.pinned, pointer) ? cudaMemoryTypeHost
                                                : cudaMemoryTypeUnregistered;
    (attributes->type == cudaMemoryTypeDevice ? attributes->devicePointer : attributes->hostPointer) = (void*)pointer;
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    wait(device().waits);
    copy(to, from, bytes, kind);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    if (kind == cudaMemcpyDeviceToHost && is_pinned(to)) {
        memset(to, 0xff, bytes);
        Device& d = device();
        std::lock_guard<std::mutex> guard(d.lock);
        d.to_host++;
        d.enqueued.push_back({to, from, bytes});
        return cudaSuccess;
    }
    if (kind == cudaMemcpyDeviceToHost) wait(device().waits);  // returns only when the copy is made
    if (kind == cudaMemcpyHostToDevice && bytes > 65536 && !is_pinned(from)) device().waits++;  // may do so, too
    copy(to, from, bytes, kind);
    return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
    copy(to, from, bytes, cudaMemcpyDeviceToDevice);
    return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaMemset(void*, int, size_t) { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void** address, const void*) {
    static char symbols[65536];
    *address = symbols;
    return cudaSuccess;
}

// Streams and events. All work but a copy to pinned memory is over as soon as it is enqueued.

cudaError_t cudaStreamCreate(cudaStream_t* stream) { *stream = (cudaStream_t)malloc(64); return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return wait(device().waits); }
cudaError_t cudaDeviceSynchronize() { return wait(device().waits); }
cudaError_t cudaStreamQuery(cudaStream_t) { return query(); }
cudaError_t cudaEventQuery(cudaEvent_t) { return query(); }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* event) { *event = (cudaEvent_t)malloc(64); return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return wait(device().event_waits); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
    *milliseconds = 5;
    return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError";
}
const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "error of the null device";
}

// Kernels

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024, attributes->numRegs = 64, attributes->maxDynamicSharedSizeBytes = 49152;
    attributes->binaryVersion = attributes->ptxVersion = capability();
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    *blocks = 2;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
    *blocks = 2;
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    *function = (void*)unknown_driver_function;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) {
    static void* binary[4];
    return binary;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
    configuration = {grid, block, shared, stream};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
    *(void**)stream = configuration.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
    null_count();
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel((const void*)kernel, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
    return cudaLaunchKernel(function, dim3(), dim3(), nullptr, 0, nullptr);
}
}
