/* libcuda.so.1 of the null device: the functions of CUDA's driver that Triton and Inductor call. Every function
   succeeds. A kernel is counted, and not run. */

#include <stdlib.h>
#include <string.h>

void null_count(void) __attribute__((weak)); /* in runtime.cpp; absent where only the driver is loaded */

static int capability(void) {
    const char *text = getenv("NULLCUDA_SM");
    return text ? atoi(text) : 90;
}

#define SUCCEEDS(name) int name() { return 0; }
SUCCEEDS(cuInit) SUCCEEDS(cuCtxSetCurrent) SUCCEEDS(cuCtxSetLimit) SUCCEEDS(cuCtxSynchronize)
SUCCEEDS(cuDevicePrimaryCtxRelease) SUCCEEDS(cuDevicePrimaryCtxRelease_v2) SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig) SUCCEEDS(cuModuleUnload) SUCCEEDS(cuStreamSynchronize) SUCCEEDS(cuMemFree_v2)
SUCCEEDS(cuMemcpyHtoD_v2) SUCCEEDS(cuMemcpyDtoH_v2) SUCCEEDS(cuTensorMapEncodeTiled) SUCCEEDS(cuTensorMapEncodeIm2col)
SUCCEEDS(cuLinkCreate_v2) SUCCEEDS(cuLinkAddData_v2) SUCCEEDS(cuLinkComplete)

int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "null device", size); return 0; }
int cuGetErrorString(int error, const char **text) { *text = "error of the null device"; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }

/* Attributes by their numbers in cuda.h, with the values of an H100. */
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 1: *value = 1024; break;       /* MAX_THREADS_PER_BLOCK */
    case 8: *value = 49152; break;      /* MAX_SHARED_MEMORY_PER_BLOCK */
    case 10: *value = 32; break;        /* WARP_SIZE */
    case 12: *value = 65536; break;     /* MAX_REGISTERS_PER_BLOCK */
    case 13: *value = 1980000; break;   /* CLOCK_RATE, kHz */
    case 16: *value = 132; break;       /* MULTIPROCESSOR_COUNT */
    case 36: *value = 2619000; break;   /* MEMORY_CLOCK_RATE, kHz */
    case 37: *value = 5120; break;      /* GLOBAL_MEMORY_BUS_WIDTH, bits */
    case 38: *value = 52428800; break;  /* L2_CACHE_SIZE */
    case 39: *value = 2048; break;      /* MAX_THREADS_PER_MULTIPROCESSOR */
    case 75: *value = capability() / 10; break;
    case 76: *value = capability() % 10; break;
    case 81: *value = 233472; break;    /* MAX_SHARED_MEMORY_PER_MULTIPROCESSOR */
    case 82: *value = 65536; break;     /* MAX_REGISTERS_PER_MULTIPROCESSOR */
    case 97: *value = 232448; break;    /* MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */
    default: *value = 1;
    }
    return 0;
}

static char context[64];
int cuCtxGetCurrent(void **current) { *current = context; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetLimit(size_t *value, int limit) { *value = 8 << 20; return 0; }
int cuDevicePrimaryCtxRetain(void **retained, int device) { *retained = context; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) { *flags = 0; *is_active = 1; return 0; }

int cuModuleLoad(void **module, const char *file) { *module = malloc(16); return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = malloc(16); return 0; }
int cuModuleLoadDataEx(void **module) { *module = malloc(16); return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = strdup(name); return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 64 : 0; /* threads per block, registers */
    return 0;
}
int cuOccupancyMaxActiveClusters(int *clusters) { *clusters = 132; return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks) { *blocks = 2; return 0; }
int cuPointerGetAttribute(void *value, int attribute, unsigned long long pointer) {
    *(unsigned long long *)value = pointer;
    return 0;
}
int cuMemAlloc_v2(void **memory, size_t bytes) { *memory = malloc(64); return 0; }

static int launch(void) {
    if (null_count) null_count();
    return 0;
}
int cuLaunchKernel(void) { return launch(); }
int cuLaunchCooperativeKernel(void) { return launch(); }
int cuLaunchKernelEx(void) { return launch(); }
