// cuBLAS and cuBLASLt for machines without a GPU: a product is one kernel that computes nothing.

#include "fakecuda.h"

#include <cublasLt.h>
#include <cublas_v2.h>

#include <cstdlib>
#include <cstring>

namespace {

constexpr size_t kHandleBytes = 64;

template <class Handle>
cublasStatus_t make(Handle* handle) {
  *handle = static_cast<Handle>(calloc(1, kHandleBytes));
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

FAKECUDA_API cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) { return make(handle); }

FAKECUDA_API cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t* mode) {
  *mode = CUBLAS_DEFAULT_MATH;
  return CUBLAS_STATUS_SUCCESS;
}

FAKECUDA_API cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t* mode) {
  *mode = CUBLAS_POINTER_MODE_HOST;
  return CUBLAS_STATUS_SUCCESS;
}

FAKECUDA_API size_t cublasLtGetVersion() { return CUBLAS_VERSION; }

FAKECUDA_API cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* handle, cublasComputeType_t,
                                                     cudaDataType_t) {
  return make(handle);
}

FAKECUDA_API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* handle) { return make(handle); }

FAKECUDA_API cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* handle, cudaDataType, uint64_t, uint64_t,
                                                       int64_t) {
  return make(handle);
}

FAKECUDA_API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                                           cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                           cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                           cublasLtMatmulPreference_t, int,
                                                           cublasLtMatmulHeuristicResult_t* results, int* count) {
  memset(results, 0, sizeof *results);
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}
