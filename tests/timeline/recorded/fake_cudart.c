/* A CUDA runtime without a GPU: hands out addresses that only grow, and counts bytes against a capacity. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint64_t used, next_address = 2u << 20;
static uint64_t capacity(void) { const char *s = getenv("FAKE_CAPACITY"); return s ? strtoull(s, 0, 10) : 1ull << 46; }
static uint64_t total(void) { const char *s = getenv("FAKE_TOTAL"); return s ? strtoull(s, 0, 10) : capacity(); }
static uint64_t new_address(uint64_t n) {
  const uint64_t page = 2u << 20;
  uint64_t a = next_address;
  next_address += (n + page - 1) / page * page + page;
  return a;
}
static struct { uint64_t at, size; } segment[1 << 20];
static int num_segments;

#define OK return cudaSuccess
cudaError_t cudaMalloc(void **p, size_t n) {
  if (used + n > capacity()) return cudaErrorMemoryAllocation;
  used += n;
  *p = (void *)new_address(n);
  segment[num_segments].at = (uint64_t)*p;
  segment[num_segments++].size = n;
  OK;
}
cudaError_t cudaFree(void *p) {
  for (int i = 0; p && i < num_segments; i++)
    if (segment[i].at == (uint64_t)p) { used -= segment[i].size; segment[i] = segment[--num_segments]; OK; }
  if (p) abort();
  OK;
}
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) { *f = capacity() - used; *t = total(); OK; }
cudaError_t cudaGetDevice(int *d) { *d = 0; OK; }
cudaError_t cudaSetDevice(int d) { OK; }
cudaError_t cudaGetDeviceCount(int *n) { *n = 1; OK; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p); p->totalGlobalMem = total(); strcpy(p->name, "fake"); p->major = 9; OK;
}
cudaError_t cudaGetLastError(void) { OK; }
const char *cudaGetErrorName(cudaError_t e) { return "name"; }
const char *cudaGetErrorString(cudaError_t e) { return "string"; }
cudaError_t cudaDriverGetVersion(int *v) { *v = 13000; OK; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { OK; }
cudaError_t cudaDeviceSynchronize(void) { OK; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = cudaStreamCaptureStatusNone; OK; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *a, int *b) { *a = 0; *b = 0; OK; }
static uint64_t handle_size[1 << 20];
static int num_handles = 1;
static CUresult reserve(CUdeviceptr *p, size_t n, size_t a, CUdeviceptr h, unsigned long long f) { *p = new_address(n); return 0; }
static CUresult create(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *p, unsigned long long f) {
  if (used + n > capacity()) return CUDA_ERROR_OUT_OF_MEMORY;
  used += n; handle_size[num_handles] = n; *h = num_handles++; return 0;
}
static CUresult release(CUmemGenericAllocationHandle h) { used -= handle_size[h]; handle_size[h] = 0; return 0; }
static CUresult attribute(int *v, CUdevice_attribute a, CUdevice d) { *v = 0; return 0; }
static CUresult granularity(size_t *g, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) { *g = 2u << 20; return 0; }
static CUresult nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *r) {
  *f = (void *)nothing;
  if (!strcmp(name, "cuMemAddressReserve")) *f = (void *)reserve;
  if (!strcmp(name, "cuMemCreate")) *f = (void *)create;
  if (!strcmp(name, "cuMemRelease")) *f = (void *)release;
  if (!strcmp(name, "cuDeviceGetAttribute")) *f = (void *)attribute;
  if (!strcmp(name, "cuMemGetAllocationGranularity")) *f = (void *)granularity;
  if (r) *r = cudaDriverEntryPointSuccess;
  OK;
}

/* NVML, opened under its own name (a link to this file): no fabric, one process. */
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { *device = (void *)1; return 0; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return 0; /* left as zeros: not supported */ }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
struct process { unsigned pid; unsigned long long bytes; unsigned instance[2]; };
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *n, struct process *p) {
  *n = 1; p->pid = getpid(); p->bytes = total() - (capacity() - used); return 0;
}
