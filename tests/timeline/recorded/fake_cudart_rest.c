/* What the allocator links to and never calls on one stream. No header, so that no prototype is needed. */
#include <stdlib.h>
#define NOT(name) int name(void) { abort(); }
NOT(cudaDeviceCanAccessPeer) NOT(cudaDeviceEnablePeerAccess) NOT(cudaDeviceGetDefaultMemPool)
NOT(cudaEventCreateWithFlags) NOT(cudaEventDestroy) NOT(cudaEventElapsedTime) NOT(cudaEventQuery) NOT(cudaEventRecord)
NOT(cudaEventSynchronize) NOT(cudaFreeAsync) NOT(cudaGraphNodeGetDependencies) NOT(cudaIpcCloseMemHandle)
NOT(cudaIpcGetMemHandle) NOT(cudaIpcOpenMemHandle) NOT(cudaMallocAsync) NOT(cudaMemPoolGetAttribute) NOT(cudaMemPoolSetAccess)
NOT(cudaMemPoolSetAttribute) NOT(cudaMemPoolTrimTo) NOT(cudaMemcpy) NOT(cudaMemcpyAsync) NOT(cudaMemcpyPeerAsync)
NOT(cudaStreamCreateWithPriority) NOT(cudaStreamGetCaptureInfo) NOT(cudaStreamQuery) NOT(cudaStreamWaitEvent)
NOT(cudaThreadExchangeStreamCaptureMode)

