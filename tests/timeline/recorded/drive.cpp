// Runs a script through the real caching allocator of libc10_cuda.so.
// Input, one word group each: "a BYTES" (allocations are numbered from 0), "f NUMBER", "e" (empty the cache).
// Output, one line for each: address (-1: out of memory), requested, allocated, reserved, peak reserved bytes, retries,
// out-of-memory errors, and the message if there was one.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>
#include <iostream>
#include <string>
#include <vector>

int main() {
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  allocator->init(1);
  c10::cuda::detail::init_p2p_access_cache(1);
  std::vector<void*> blocks;
  char verb;
  while (std::cin >> verb) {
    long long address = 0;
    unsigned long long number = 0;
    std::string message;
    if (verb == 'a') {
      std::cin >> number;
      blocks.push_back(nullptr);
      try {
        blocks.back() = allocator->raw_alloc(number);
        address = reinterpret_cast<long long>(blocks.back());
      } catch (const c10::OutOfMemoryError& error) {
        address = -1;
        message = error.msg();
      }
    } else if (verb == 'f') {
      std::cin >> number;
      allocator->raw_delete(blocks[number]);
    } else {
      allocator->emptyCache();
    }
    const auto stats = allocator->getDeviceStats(0);
    std::cout << address << ' ' << stats.requested_bytes[0].current << ' ' << stats.allocated_bytes[0].current << ' '
              << stats.reserved_bytes[0].current << ' ' << stats.reserved_bytes[0].peak << ' '
              << stats.num_alloc_retries << ' ' << stats.num_ooms << ' ' << message.substr(0, message.find('\n')) << '\n';
  }
}
