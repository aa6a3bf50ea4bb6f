// NCCL for machines without a GPU: nothing is sent, and every operation is written to a log, one line each.
//
// FAKE_CUDA_LOG names a folder; each process appends to its own file there, nccl-<pid>.tsv:
//
//     device  stream  communicator  size  rank  max CTAs  operation  peer  bytes  kernels
//
// The last are those that the process launched up to this one, of any kind.
//
// A communicator's name is the same on all its ranks: it follows from the unique id, or from the communicator that it
// was split from, how often that was split before, and the color. ``comm`` lines say that one was made.

#include "fakecuda.h"

#include <nccl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

struct ncclComm {
  std::string name;
  int size;  // 0: not known, of one that was split
  int rank;
  int max_ctas;  // of one kernel; 0 is NCCL's choice
  int num_splits;
};

namespace {

constexpr int kNobody = -1;

void log_line(const ncclComm* comm, const void* stream, const char* operation, int peer, size_t bytes) {
  static std::mutex mutex;
  const char* folder = getenv("FAKE_CUDA_LOG");
  if (!folder) return;
  std::lock_guard<std::mutex> lock(mutex);
  std::string path = std::string(folder) + "/nccl-" + std::to_string(getpid()) + ".tsv";
  FILE* file = fopen(path.c_str(), "a");
  if (!file) return;
  fprintf(file, "%d\t%p\t%s\t%d\t%d\t%d\t%s\t%d\t%zu\t%ld\n", fakecuda_device(), stream, comm->name.c_str(),
          comm->size, comm->rank, comm->max_ctas, operation, peer, bytes, fakecuda_launches());
  fclose(file);
}

size_t type_bytes(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    default: fakecuda_refuse("an NCCL operation on an 8 bit floating point type");
  }
}

ncclResult_t launch(const char* operation, int peer, size_t count, ncclDataType_t type, const ncclComm* comm,
                    cudaStream_t stream) {
  fakecuda_count_launch(stream);
  log_line(comm, stream, operation, peer, count * type_bytes(type));
  return ncclSuccess;
}

ncclResult_t make(ncclComm_t* made, std::string name, int size, int rank, const ncclConfig_t* config) {
  int max_ctas = config && config->maxCTAs != NCCL_CONFIG_UNDEF_INT ? config->maxCTAs : 0;
  *made = new ncclComm{std::move(name), size, rank, max_ctas, 0};
  log_line(*made, nullptr, "comm", kNobody, 0);
  return ncclSuccess;
}

std::string name_of(const ncclUniqueId& id) { return std::string(id.internal); }

}  // namespace

FAKECUDA_API ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

FAKECUDA_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> number{0};
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%d.%d", getpid(), number++);
  return ncclSuccess;
}

FAKECUDA_API const char* ncclGetErrorString(ncclResult_t) { return "an error of the fake NCCL"; }
FAKECUDA_API const char* ncclGetLastError(ncclComm_t) { return ""; }

FAKECUDA_API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return make(comm, name_of(id), size, rank, nullptr);
}

FAKECUDA_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                                 ncclConfig_t* config) {
  return make(comm, name_of(id), size, rank, config);
}

FAKECUDA_API ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int, ncclUniqueId* ids,
                                                   ncclConfig_t* config) {
  return make(comm, name_of(ids[0]), size, rank, config);
}

FAKECUDA_API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
  std::string name = comm->name + "/" + std::to_string(comm->num_splits++) + ":" + std::to_string(color);
  *made = nullptr;
  return color == NCCL_SPLIT_NOCOLOR ? ncclSuccess : make(made, name, 0, key, config);
}

FAKECUDA_API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

FAKECUDA_API ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  if (!comm->size) fakecuda_refuse("ncclCommCount of a communicator that was split");
  *count = comm->size;
  return ncclSuccess;
}

FAKECUDA_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

FAKECUDA_API ncclResult_t ncclSend(const void*, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                                   cudaStream_t stream) {
  return launch("send", peer, count, type, comm, stream);
}

FAKECUDA_API ncclResult_t ncclRecv(void*, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                                   cudaStream_t stream) {
  return launch("recv", peer, count, type, comm, stream);
}

FAKECUDA_API ncclResult_t ncclAllReduce(const void*, void*, size_t count, ncclDataType_t type, ncclRedOp_t,
                                        ncclComm_t comm, cudaStream_t stream) {
  return launch("all_reduce", kNobody, count, type, comm, stream);
}

FAKECUDA_API ncclResult_t ncclAllGather(const void*, void*, size_t count, ncclDataType_t type, ncclComm_t comm,
                                        cudaStream_t stream) {
  return launch("all_gather", kNobody, count, type, comm, stream);
}

FAKECUDA_API ncclResult_t ncclReduceScatter(const void*, void*, size_t count, ncclDataType_t type, ncclRedOp_t,
                                            ncclComm_t comm, cudaStream_t stream) {
  return launch("reduce_scatter", kNobody, count, type, comm, stream);
}

FAKECUDA_API ncclResult_t ncclBroadcast(const void*, void*, size_t count, ncclDataType_t type, int root,
                                        ncclComm_t comm, cudaStream_t stream) {
  return launch("broadcast", root, count, type, comm, stream);
}
