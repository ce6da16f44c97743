/* Functions of CUDA's runtime and of cuBLAS that only have to succeed on the null device. cuBLAS's products are counted
   like kernels. They are in a file of their own because CUDA's headers declare them with parameters. */

#include <string.h>

void null_count(void);

#define SUCCEEDS(name) int name() { return 0; }
SUCCEEDS(cudaDeviceEnablePeerAccess) SUCCEEDS(cudaDeviceGetDefaultMemPool) SUCCEEDS(cudaDeviceGetGraphMemAttribute)
SUCCEEDS(cudaDeviceSetGraphMemAttribute) SUCCEEDS(cudaEventDestroy) SUCCEEDS(cudaEventRecord)
SUCCEEDS(cudaEventRecordWithFlags) SUCCEEDS(cudaFuncSetAttribute) SUCCEEDS(cudaGetLastError)
SUCCEEDS(cudaHostUnregister) SUCCEEDS(cudaIpcCloseMemHandle) SUCCEEDS(cudaIpcGetMemHandle)
SUCCEEDS(cudaIpcOpenMemHandle) SUCCEEDS(cudaKernelSetAttributeForDevice) SUCCEEDS(cudaMemPoolGetAttribute)
SUCCEEDS(cudaMemPoolSetAccess) SUCCEEDS(cudaMemPoolSetAttribute) SUCCEEDS(cudaMemPoolTrimTo)
SUCCEEDS(cudaPeekAtLastError) SUCCEEDS(cudaProfilerStart) SUCCEEDS(cudaProfilerStop) SUCCEEDS(cudaStreamAddCallback)
SUCCEEDS(cudaStreamDestroy) SUCCEEDS(cudaStreamWaitEvent) SUCCEEDS(cublasDestroy_v2)
SUCCEEDS(cublasSetStream_v2) SUCCEEDS(cublasSetWorkspace_v2) SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2) SUCCEEDS(cublasSetSmCountTarget) SUCCEEDS(cublasLtMatmulDescDestroy)
SUCCEEDS(cublasLtMatrixLayoutDestroy) SUCCEEDS(cublasLtMatmulPreferenceDestroy)
SUCCEEDS(cublasLtMatmulDescSetAttribute) SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute) SUCCEEDS(cublasLtMatmulAlgoInit) SUCCEEDS(cublasLtMatmulAlgoCheck)
SUCCEEDS(cublasLtMatmulAlgoConfigSetAttribute) SUCCEEDS(cublasLtMatmulAlgoConfigGetAttribute)

static char handle[4096];
int cublasCreate_v2(void **created) { *created = handle; return 0; }
int cublasGetMathMode(void *blas, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *blas, int *mode) { *mode = 0; return 0; }
long cublasLtGetVersion(void) { return 130401; }
int cublasLtMatmulDescCreate(void **created) { *created = handle; return 0; }
int cublasLtMatrixLayoutCreate(void **created) { *created = handle; return 0; }
int cublasLtMatmulPreferenceCreate(void **created) { *created = handle; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *blas, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    if (wanted) memset(results, 0, 96); /* one cublasLtMatmulHeuristicResult_t, whose state 0 is success */
    *found = 1;
    return 0;
}

#define PRODUCT(name) int name() { null_count(); return 0; }
PRODUCT(cublasGemmEx) PRODUCT(cublasGemmStridedBatchedEx) PRODUCT(cublasSgemm_v2) PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemmEx) PRODUCT(cublasSgemmStridedBatched) PRODUCT(cublasSgemv_v2) PRODUCT(cublasDgemv_v2)
PRODUCT(cublasDotEx) PRODUCT(cublasSdot_v2) PRODUCT(cublasDdot_v2) PRODUCT(cublasLtMatmul)
