// An accelerator that every machine has: device memory is host memory behind an allocator that refuses what does not
// fit, and that rounds, caches, splits and merges blocks as the CUDA allocator does. Kernels are those of the CPU; they
// run on aliases of the device's memory, so that only copies that a program asks for are copies, and are counted.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#if __has_include(<c10/core/CachingDeviceAllocator.h>)
#include <c10/core/CachingDeviceAllocator.h>
#define SIM_HAS_DEVICE_ALLOCATOR 1
#endif

#include <sys/mman.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr size_t kSpace = size_t(3200) * (20 << 20);  // addresses of an expandable segment, far more than there are bytes
constexpr size_t kRound = 512, kSmall = 1 << 20, kSmallSegment = 2 << 20, kLargeSegment = 20 << 20,
                 kLarge = 10 << 20, kRoundLarge = 2 << 20;

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kDevices] = {0, 0};
std::atomic<int64_t> copies[3], copied_bytes[3], synchronisations, events, next_stream{1};  // to, from, within the device

void count_copy(int way, size_t bytes) {
  copies[way] += 1;
  copied_bytes[way] += static_cast<int64_t>(bytes);
}

// ---------------------------------------------------------------------------------------------------- the allocator

struct Block;
struct BySize {
  bool operator()(const Block* a, const Block* b) const;
};
struct ByStart {
  bool operator()(const Block* a, const Block* b) const;
};
struct Pool {
  std::set<Block*, BySize> free;
  std::set<Block*, ByStart> unmapped;  // addresses of expandable segments without memory
};
struct Block {
  int device;
  char* start;
  size_t size;
  size_t asked = 0;
  bool used = false, small = false, mapped = true;
  char* base = nullptr;  // of the segment, if it is expandable
  c10::StreamId stream = 0;
  Pool* pool = nullptr;
  Block *before = nullptr, *after = nullptr;  // neighbours in the same segment
};
bool BySize::operator()(const Block* a, const Block* b) const {
  return a->size != b->size ? a->size < b->size : a->start < b->start;
}

bool ByStart::operator()(const Block* a, const Block* b) const { return a->start < b->start; }

struct Device {
  std::map<c10::StreamId, std::pair<Pool, Pool>> pools;  // of small blocks and of large ones: a stream has its own
  size_t limit = 0, share = 0;                           // of the device, and of what a process may take of it; 0: none
  size_t allocated = 0, reserved = 0, peak_allocated = 0, peak_reserved = 0, asked = 0, peak_asked = 0;
  int64_t allocations = 0, fails_at = -1, refusals = 0, flushes = 0;
  bool notes = false;
  std::vector<std::pair<const void*, int64_t>> noted;  // where each block began that was taken, or given back: -1
};

class SimAllocator final
#ifdef SIM_HAS_DEVICE_ALLOCATOR
    : public c10::DeviceAllocator {
#else
    : public c10::Allocator {
#endif
 public:
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device where(kSim, current_device);
    if (bytes == 0) return {nullptr, nullptr, &SimAllocator::release, where};
    Block* block = take(current_device, bytes);
    return {block->start, block, &SimAllocator::release, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &SimAllocator::release; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }

#ifdef SIM_HAS_DEVICE_ALLOCATOR
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override { empty_cache(); }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const Device& device = devices_[index];
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = device.allocated;
    stats.allocated_bytes[0].peak = device.peak_allocated;
    stats.reserved_bytes[0].current = device.reserved;
    stats.reserved_bytes[0].peak = device.peak_reserved;
    stats.requested_bytes[0].current = device.asked;
    stats.requested_bytes[0].peak = device.peak_asked;
    stats.num_ooms = device.refusals;
    stats.num_alloc_retries = device.flushes;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override { reset_peak(index); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override { return memory_info(index); }
#endif

  std::pair<size_t, size_t> memory_info(int index) {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t total = devices_[index].limit ? devices_[index].limit : size_t(1) << 40;
    return {total - devices_[index].reserved, total};
  }
  void empty_cache() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& device : devices_) give_back(device);
  }
  void reset_peak(int index) {
    std::lock_guard<std::mutex> lock(mutex_);
    Device& device = devices_[index];
    device.peak_allocated = device.allocated;
    device.peak_reserved = device.reserved;
    device.peak_asked = device.asked;
  }
  void set_limit(int index, size_t limit) {
    std::lock_guard<std::mutex> lock(mutex_);
    give_back(devices_[index]);
    devices_[index].limit = limit;
  }
  void set_share(int index, size_t share) {  // bytes that a process may take
    std::lock_guard<std::mutex> lock(mutex_);
    devices_[index].share = share;
  }
  struct Piece {
    size_t size;
    bool used;
  };
  struct Segment {
    bool small, expandable;
    int64_t stream, address;
    std::vector<Piece> blocks;
  };
  std::vector<Segment> snapshot(int index) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Segment> found;
    for (const Block* first : segments_[index]) {
      bool goes_on = false;  // each range that has memory counts as a segment
      for (const Block* one = first; one; goes_on = one->mapped, one = one->after) {
        if (!one->mapped) continue;
        if (!goes_on)
          found.push_back({one->small, one->base != nullptr, one->stream, reinterpret_cast<int64_t>(one->start), {}});
        found.back().blocks.push_back({one->size, one->used});
      }
    }
    return found;
  }
  void set_expandable(bool value) {
    std::lock_guard<std::mutex> lock(mutex_);
    expandable_ = value;
  }
  void note(int index, bool value) {
    std::lock_guard<std::mutex> lock(mutex_);
    devices_[index].notes = value;
    devices_[index].noted.clear();
  }
  std::vector<std::pair<const void*, int64_t>> noted(int index) {
    std::lock_guard<std::mutex> lock(mutex_);
    return devices_[index].noted;
  }
  void fail_at(int index, int64_t number) {  // the allocation with this number from now on is refused; -1: none
    std::lock_guard<std::mutex> lock(mutex_);
    devices_[index].fails_at = number < 0 ? -1 : devices_[index].allocations + number;
  }
  std::map<std::string, int64_t> stats(int index) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Device& one = devices_[index];
    return {{"allocated", one.allocated}, {"peak_allocated", one.peak_allocated}, {"reserved", one.reserved},
            {"peak_reserved", one.peak_reserved}, {"asked", one.asked}, {"peak_asked", one.peak_asked},
            {"limit", one.limit}, {"allocations", one.allocations}, {"refusals", one.refusals},
            {"flushes", one.flushes}};
  }

 private:
  static void release(void* context);

  Block* take(int index, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    Device& device = devices_[index];
    const int64_t number = device.allocations++;
    const size_t size = std::max(kRound, (bytes + kRound - 1) / kRound * kRound);
    auto& pools = device.pools[current_stream[index]];
    Pool& pool = size <= kSmall ? pools.first : pools.second;
    Block* block = number == device.fails_at ? nullptr : find(pool, size);
    if (block == nullptr && number != device.fails_at) block = grow(device, index, pool, size);
    if (block == nullptr) {
      device.refusals += 1;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "SIM out of memory. Tried to allocate ", bytes, " bytes. Device ",
                       index, " has a total capacity of ", device.limit, " bytes of which ",
                       device.limit > device.reserved ? device.limit - device.reserved : 0, " bytes is free. ",
                       device.allocated, " bytes is allocated, and ", device.reserved - device.allocated,
                       " bytes is reserved but unallocated.");
    }
    split(block, size);
    block->used = true;
    block->asked = bytes;
    if (device.notes) device.noted.emplace_back(block->start, bytes);
    device.allocated += block->size;
    device.asked += bytes;
    device.peak_allocated = std::max(device.peak_allocated, device.allocated);
    device.peak_asked = std::max(device.peak_asked, device.asked);
    return block;
  }

  Block* find(Pool& pool, size_t size) {
    Block wanted{0, nullptr, size};
    auto found = pool.free.lower_bound(&wanted);
    if (found == pool.free.end()) return nullptr;
    auto growable = [](const Block* one) {
      return one->size + (one->after && !one->after->mapped ? one->after->size : 0);
    };
    for (auto next = std::next(found); expandable_ && (*found)->base && next != pool.free.end(); ++next) {
      if (growable(*next) >= growable(*found)) break;
      found = next;
    }
    Block* block = *found;
    pool.free.erase(found);
    return block;
  }

  Block* grow(Device& device, int index, Pool& pool, size_t size) {
    const size_t segment = size <= kSmall ? kSmallSegment
                           : size < kLarge ? kLargeSegment
                                           : (size + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
    for (bool again : {false, true}) {
      if (again) {
        give_back(device);
        device.flushes += 1;
      }
      if (device.share && device.reserved + segment > device.share) continue;
      Block* block = expandable_ ? extend(device, index, pool, size) : fresh(device, index, pool, size, segment);
      if (block != nullptr) return block;
    }
    return nullptr;
  }

  Block* fresh(Device& device, int index, Pool& pool, size_t size, size_t segment) {
    if (device.limit && device.reserved + segment > device.limit) return nullptr;
    char* start = place(segment);
    reserve(device, segment);
    return segment_of(index, pool, size, start, segment);
  }

  // Behind all segments before, so that it does not depend on the host which of free blocks of one size is the first.
  char* place(size_t segment) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void* space = mmap(next_, segment, PROT_READ | PROT_WRITE, flags, -1, 0);
    TORCH_CHECK(space == next_, "no addresses for a segment");
    next_ += segment;
    return static_cast<char*>(space);
  }

  Block* segment_of(int index, Pool& pool, size_t size, char* start, size_t bytes) {
    auto* block = new Block{index, start, bytes};
    block->pool = &pool;
    block->small = size <= kSmall;
    block->stream = current_stream[index];
    segments_[index].insert(block);
    return block;
  }

  void reserve(Device& device, size_t bytes) {
    device.reserved += bytes;
    device.peak_reserved = std::max(device.peak_reserved, device.reserved);
  }

  // Expandable segments: addresses of which pages have memory, 2 MiB each for small blocks and 20 MiB for large ones.

  Block* extend(Device& device, int index, Pool& pool, size_t size) {
    Block* block = room(index, pool, size);
    if (!block->mapped && !(block = map(device, block, std::min(block->size, size)))) return nullptr;
    while (block->size < size) {
      block = map(device, block->after, std::min(block->after->size, size - block->size));
      if (block == nullptr) return nullptr;
    }
    pool.free.erase(block);
    return block;
  }

  // The first of free blocks, one after the other, that have addresses enough.
  Block* room(int index, Pool& pool, size_t size) {
    for (Block* one : pool.unmapped) {
      Block* first = one->before && !one->before->used ? one->before : one;
      size_t bytes = 0;
      for (Block* next = first; bytes < size && next && !next->used; next = next->after) bytes += next->size;
      if (bytes >= size) return first;
    }
    void* space = mmap(nullptr, kSpace, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(space != MAP_FAILED, "no addresses for an expandable segment");
    Block* block = segment_of(index, pool, size, static_cast<char*>(space), kSpace);
    block->base = block->start;
    block->mapped = false;
    pool.unmapped.insert(block);
    return block;
  }

  static size_t page_of(const Block* block) { return block->small ? kSmallSegment : kLargeSegment; }

  Block* map(Device& device, Block* block, size_t size) {
    const size_t page = page_of(block), bytes = (size + page - 1) / page * page;
    if (device.limit && device.reserved + bytes > device.limit) return nullptr;
    block->pool->unmapped.erase(block);
    if (bytes < block->size) block->pool->unmapped.insert(cut(block, bytes));
    block->mapped = true;
    reserve(device, bytes);
    return join(block);
  }

  void unmap(Device& device, Block* block) {
    const size_t page = page_of(block), start = block->start - block->base;
    const size_t begin = (start + page - 1) / page * page, end = (start + block->size) / page * page;
    if (begin >= end) return;
    Pool& pool = *block->pool;
    pool.free.erase(block);
    if (begin > start) {
      Block* whole = cut(block, begin - start);
      pool.free.insert(block);
      block = whole;
    }
    if (end - begin < block->size) pool.free.insert(cut(block, end - begin));
    madvise(block->start, block->size, MADV_DONTNEED);
    device.reserved -= block->size;
    block->mapped = false;
    join(block);
  }

  void split(Block* block, size_t size) {
    const size_t rest = block->size - size;
    if (block->small || expandable_ ? rest < kRound : rest <= kSmall) return;
    block->pool->free.insert(cut(block, size));
  }

  Block* cut(Block* block, size_t size) {  // the rest of a block beyond some bytes
    auto* other = new Block(*block);
    other->start += size;
    other->size -= size;
    other->used = false;
    other->before = block;
    if (other->after) other->after->before = other;
    block->after = other;
    block->size = size;
    return other;
  }

  void put_back(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    Device& device = devices_[block->device];
    block->used = false;
    if (device.notes) device.noted.emplace_back(block->start, -1);
    device.allocated -= block->size;
    device.asked -= block->asked;
    join(block);
  }

  Block* join(Block* block) {  // with neighbours that are free, too
    auto joins = [&](const Block* one) { return one && !one->used && one->mapped == block->mapped; };
    auto take_out = [](Block* one) { one->mapped ? one->pool->free.erase(one) : one->pool->unmapped.erase(one); };
    if (joins(block->after)) {
      take_out(block->after);
      merge(block, block->after);
    }
    if (joins(block->before)) {
      Block* first = block->before;
      take_out(first);
      merge(first, block);
      block = first;
    }
    block->mapped ? (void)block->pool->free.insert(block) : (void)block->pool->unmapped.insert(block);
    return block;
  }

  void merge(Block* block, Block* next) {
    block->size += next->size;
    block->after = next->after;
    if (block->after) block->after->before = block;
    delete next;
  }

  void give_back(Device& device) {
    for (auto& [stream, pools] : device.pools) for (Pool* pool : {&pools.first, &pools.second}) {
      for (Block* block : std::vector<Block*>(pool->free.begin(), pool->free.end())) {
        if (block->base) {
          unmap(device, block);
        } else if (!block->before && !block->after) {
          device.reserved -= block->size;
          pool->free.erase(block);
          segments_[block->device].erase(block);
          munmap(block->start, block->size);
          delete block;
        }
      }
    }
  }

  std::mutex mutex_;
  Device devices_[kDevices];
  std::set<Block*> segments_[kDevices];  // by their first block, which stays the first one
  bool expandable_ = false;
  char* next_ = reinterpret_cast<char*>(size_t(1) << 44);
};

SimAllocator& allocator() {
  static auto* one = new SimAllocator();
  return *one;
}

void SimAllocator::release(void* context) {
  if (context != nullptr) allocator().put_back(static_cast<Block*>(context));
}

class HostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    std::lock_guard<std::mutex> lock(mutex());
    if (data) pinned()[static_cast<char*>(data)] = bytes;
    return {data, data, &HostAllocator::release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &HostAllocator::release; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
  static bool is_pinned(const void* data) {
    std::lock_guard<std::mutex> lock(mutex());
    auto found = pinned().upper_bound(static_cast<char*>(const_cast<void*>(data)));
    if (found == pinned().begin()) return false;
    --found;
    return static_cast<const char*>(data) < found->first + found->second;
  }

 private:
  static std::map<char*, size_t>& pinned() {
    static auto* one = new std::map<char*, size_t>();
    return *one;
  }
  static std::mutex& mutex() {
    static auto* one = new std::mutex();
    return *one;
  }
  static void release(void* data) {
    std::lock_guard<std::mutex> lock(mutex());
    pinned().erase(static_cast<char*>(data));
    std::free(data);
  }
};

HostAllocator& host_allocator() {
  static auto* one = new HostAllocator();
  return *one;
}

// ------------------------------------------------------------------------------------------- devices, streams, events

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kSim, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "sim has ", kDevices, " devices, got index ", int(device.index()));
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(c10::Device device) const override { return stream(current_stream[at(device)], device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(0, device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override { return stream(next_stream++, device); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = getStream(to.device());
    current_stream[at(to.device())] = to.id();
    return before;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    events += 1;
    if (*event == nullptr) *event = new int(0);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<int*>(event); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { synchronisations += 1; }
  void synchronizeEvent(void*) const override { synchronisations += 1; }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronisations += 1; }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }

 private:
  static int at(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }
  static c10::Stream stream(c10::StreamId id, c10::Device device) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, static_cast<c10::DeviceIndex>(at(device))), id);
  }
};

// A generator of the device: it draws through one of the CPU, which is its own.
struct SimGenerator final : c10::GeneratorImpl {
  explicit SimGenerator(c10::DeviceIndex index)
      : GeneratorImpl(c10::Device(kSim, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        own(at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val)) {}
  void set_current_seed(uint64_t seed) override { own.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return own.current_seed(); }
  uint64_t seed() override { return own.seed(); }
  void set_state(const c10::TensorImpl& state) override { own.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return own.unsafeGetGeneratorImpl()->get_state(); }
  SimGenerator* clone_impl() const override {
    auto* one = new SimGenerator(device().index());
    one->own = own.clone();
    return one;
  }
  at::Generator own;
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* all = new std::vector<at::Generator>{at::make_generator<SimGenerator>(0), at::make_generator<SimGenerator>(1)};
  return all->at(index < 0 ? current_device : index);
}

at::Generator& drawn_from(const at::Generator& generator) {
  return static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl())->own;
}

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { SimGuard().setDevice({kSim, index}); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return SimGuard().exchangeDevice({kSim, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override { return HostAllocator::is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<SimGenerator>(index < 0 ? current_device : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::OptionalDeviceGuard guard(storage.device());
    auto fresh = allocator().allocate(bytes);
    if (storage.nbytes() && bytes) std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

// ------------------------------------------------------------------------------------------------------------ kernels

at::Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin,
                               std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Cannot pin 'sim' memory, only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor sim_empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// A tensor of the CPU over the same memory.
at::Tensor host_alias(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::kCPU);
  at::Tensor made;
  if (tensor.numel() == 0) {
    made = at::empty_strided(tensor.sizes(), tensor.strides(), options);
  } else {
    made = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, options);
  }
  if (tensor.dim() == 0) made.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  if (tensor.is_conj()) made = made.conj();
  if (tensor.is_neg()) made = made._neg_view();
  return made;
}

at::Tensor plain(const at::Tensor& tensor) { return on_device(tensor) ? host_alias(tensor) : tensor; }

at::Tensor to_device(const at::Tensor& made, c10::Device device) {
  auto options = made.options().device(device);
  at::Tensor result = at::empty_strided(made.sizes(), made.strides(), options);
  if (made.numel()) host_alias(result).copy_(made);
  if (made.dim() == 0) result.unsafeGetTensorImpl()->set_wrapped_number(made.unsafeGetTensorImpl()->is_wrapped_number());
  return result;
}

const std::set<std::string>& mixes_devices() {  // what CUDA lets meet tensors of the host
  static const auto* all = new std::set<std::string>{
      "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index.Tensor",
      "aten::index_put", "aten::_pack_padded_sequence", "aten::_pack_padded_sequence_backward",
      "aten::_ctc_loss", "aten::_ctc_loss_backward", "aten::_ctc_loss.Tensor", "aten::_ctc_loss_backward.Tensor"};
  return *all;
}

struct Call {
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases;  // of the CPU, of the device
  c10::Device device{kSim, current_device};
  bool found = false;
  bool mixed_is_fine = false;
  std::string name;
  bool host = false;

  at::Tensor in(const at::Tensor& tensor, bool is_result = false) {
    if (!on_device(tensor)) {
      if (tensor.defined() && tensor.device().is_cpu() && tensor.dim() > 0) host = true;
      return tensor;
    }
    TORCH_CHECK(!found || tensor.device() == device, "Expected all tensors to be on the same device, but found at least "
                "two devices, ", device, " and ", tensor.device(), "! (when checking ", name, ")");
    device = tensor.device();
    found = true;
    at::Tensor made = host_alias(tensor);
    if (is_result) made = at::empty({0}, made.options());  // which the kernel makes as large as it needs
    aliases.emplace_back(made, tensor);
    return made;
  }

  at::Tensor out(const at::Tensor& made) {
    if (!made.defined() || !made.device().is_cpu()) return made;
    for (auto& [cpu, own] : aliases) {
      if (cpu.is_same(made)) {
        if (!made.sizes().equals(own.sizes())) own.resize_(made.sizes());
        if (made.numel() && made.data_ptr() != own.data_ptr()) host_alias(own).copy_(made);
        return own;
      }
    }
    for (auto& [cpu, own] : aliases) {  // a view of what lies on the device
      if (made.numel() && cpu.numel() && made.storage().data_ptr().get() == cpu.storage().data_ptr().get()) {
        return own.as_strided(made.sizes(), made.strides(), own.storage_offset() + made.storage_offset());
      }
    }
    return to_device(made, device);
  }
};

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const size_t begin = stack->size() - count;
  Call call;
  call.name = schema.operator_name().name +
              (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  call.mixed_is_fine = mixes_devices().count(call.name) > 0;
  for (size_t number = 0; number < count; ++number) {
    auto& value = (*stack)[begin + number];
    if (value.isTensor()) {
      value = call.in(value.toTensor(), schema.arguments()[number].is_out());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> made;
      for (const at::Tensor& one : value.toTensorVector()) made.push_back(call.in(one));
      value = c10::List<at::Tensor>(made);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> made;
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorList()) {
        made.push_back(one.has_value() ? std::optional<at::Tensor>(call.in(*one)) : std::nullopt);
      }
      value = made;
    } else if (value.isDevice() && value.toDevice().type() == kSim) {
      call.device = value.toDevice().has_index() ? value.toDevice() : c10::Device(kSim, current_device);
      call.found = true;
      value = c10::Device(c10::kCPU);
    }
  }
  TORCH_CHECK(!(call.found && call.host) || call.mixed_is_fine, "Expected all tensors to be on the same device, but "
              "found at least two devices, ", call.device, " and cpu! (when checking ", call.name, ")");
  for (size_t number = 0; number < count; ++number) {  // draws are of the device
    auto& value = (*stack)[begin + number];
    if (schema.arguments()[number].type()->str().rfind("Generator", 0) == 0) {
      if (value.isNone()) {
        value = drawn_from(default_generator(call.device.index()));
      } else if (value.toGenerator().device().type() == kSim) {
        value = drawn_from(value.toGenerator());
      }
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const size_t results = schema.returns().size();
  for (size_t number = stack->size() - results; number < stack->size(); ++number) {
    auto& value = (*stack)[number];
    if (value.isTensor()) {
      value = call.out(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> made;
      for (const at::Tensor& one : value.toTensorVector()) made.push_back(call.out(one));
      value = c10::List<at::Tensor>(made);
    }
  }
}

// Products give zeros while the device is idle: what is only looked at for its memory need not be computed.
bool idle = false;

at::Tensor zeros_like_shape(at::IntArrayRef size, const at::Tensor& like) {
  c10::OptionalDeviceGuard guard(like.device());
  auto made = at::empty(size, like.options());
  if (made.numel()) std::memset(made.data_ptr(), 0, made.nbytes());
  return made;
}

void on_one_device(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK(a.device() == b.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
              a.device(), " and ", b.device(), "! (when checking a product)");
}

at::Tensor sim_mm(const at::Tensor& a, const at::Tensor& b) {
  on_one_device(a, b);
  if (idle) return zeros_like_shape({a.size(0), b.size(1)}, a);
  return to_device(at::mm(plain(a), plain(b)), a.device());
}

at::Tensor sim_bmm(const at::Tensor& a, const at::Tensor& b) {
  on_one_device(a, b);
  if (idle) return zeros_like_shape({a.size(0), a.size(1), b.size(2)}, a);
  return to_device(at::bmm(plain(a), plain(b)), a.device());
}

at::Tensor sim_addmm(const at::Tensor& self, const at::Tensor& a, const at::Tensor& b, const at::Scalar& beta,
                     const at::Scalar& alpha) {
  on_one_device(a, b);
  on_one_device(self, a);
  if (idle) return zeros_like_shape({a.size(0), b.size(1)}, a);
  return to_device(at::addmm(plain(self), plain(a), plain(b), beta, alpha), a.device());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  plain(to).copy_(plain(from));
  const int way = on_device(from) ? (on_device(to) ? 2 : 1) : 0;
  count_copy(way, to.numel() * to.element_size());
  if (way == 1) synchronisations += 0;
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  synchronisations += 1;
  return host_alias(tensor).item();
}

at::Tensor sim_as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                         self.key_set(), self.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset.has_value() ? offset->guard_int(__FILE__, __LINE__) : self.storage_offset());
  return result;
}

at::Tensor sim_view(const at::Tensor& self, c10::SymIntArrayRef size) {
  auto wanted = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(size), self.numel());
  auto stride = at::detail::computeStride(self.sizes(), self.strides(), wanted);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride (at least one "
              "dimension spans across two contiguous subspaces). Use .reshape(...) instead.");
  return sim_as_strided(self, c10::fromIntArrayRefSlow(wanted), c10::fromIntArrayRefSlow(*stride), std::nullopt);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return sim_as_strided(self, size, stride, std::nullopt);
}

const at::Tensor& sim_resize(const at::Tensor& self, c10::SymIntArrayRef wanted, std::optional<at::MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(wanted);
  if (self.sizes().equals(size)) return self;
  auto* impl = self.unsafeGetTensorImpl();
  const size_t bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.element_size();
  if (bytes > self.storage().nbytes()) SimHooks().resizePrivateUse1Bytes(self.storage(), bytes);
  impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !sizes.empty()) {
    impl->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.guard_int(__FILE__, __LINE__));
  }
  return self;
}

at::Tensor& set_source_storage(at::Tensor& self, at::Storage source) {
  const int64_t size = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, c10::SymIntArrayRef{c10::SymInt(size)}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

at::Tensor& set_nothing(at::Tensor& self) {
  auto fresh = at::empty({0}, self.options());
  return set_tensor(self, fresh);
}

// Several kernels of torch ask for these by name instead of falling back.
at::Tensor sim_convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  if (idle) {
    auto shape = at::convolution_symint(input.to(at::kMeta), weight.to(at::kMeta), std::nullopt, stride, padding, dilation,
                                        transposed, output_padding, groups);
    return zeros_like_shape(shape.sizes(), input);
  }
  auto own = bias.has_value() && bias->defined() ? std::optional<at::Tensor>(plain(*bias)) : std::nullopt;
  return to_device(at::convolution_symint(plain(input), plain(weight), own, stride, padding, dilation, transposed,
                                          output_padding, groups), input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> sim_convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  if (idle) {
    auto of = [&](bool wanted, const at::Tensor& like) {
      return wanted ? zeros_like_shape(like.sizes(), like) : at::Tensor();
    };
    auto bias = mask[2] ? zeros_like_shape({gradient.size(1)}, gradient) : at::Tensor();
    return {of(mask[0], input), of(mask[1], weight), bias};
  }
  std::optional<std::vector<c10::SymInt>> sizes;
  if (mask[2]) sizes = std::vector<c10::SymInt>{gradient.sym_size(1)};
  auto made = at::convolution_backward_symint(
      plain(gradient), plain(input), plain(weight),
      sizes.has_value() ? at::OptionalSymIntArrayRef(*sizes) : at::OptionalSymIntArrayRef(), stride, padding, dilation,
      transposed, output_padding, groups, mask);
  auto there = [&](const at::Tensor& one) { return one.defined() ? to_device(one, input.device()) : one; };
  return {there(std::get<0>(made)), there(std::get<1>(made)), there(std::get<2>(made))};
}

std::tuple<at::Tensor, at::Tensor> sim_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) {
    return {input.clone(), at::ones(input.sizes(), input.options().dtype(at::kBool))};
  }
  auto mask = at::empty(input.sizes(), at::kFloat).bernoulli_(1 - p, drawn_from(default_generator(input.device().index())));
  auto scaled = host_alias(input) * mask * (p == 1 ? 0.0 : 1 / (1 - p));
  return {to_device(scaled.to(input.scalar_type()), input.device()), to_device(mask.to(at::kBool), input.device())};
}

at::Tensor sim_dropout_backward(const at::Tensor& gradient, const at::Tensor& mask, double scale) {
  return to_device((host_alias(gradient) * host_alias(mask) * scale).to(gradient.scalar_type()), gradient.device());
}

int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>& bias,
                   double dropout, bool, std::optional<double>, bool) {
  const bool learns = bias.has_value() && bias->defined() && bias->requires_grad();
  return static_cast<int64_t>(dropout > 0 || learns ? sdp::SDPBackend::math : sdp::SDPBackend::overrideable);
}

using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// One kernel, as on CUDA; without it torch takes it apart into others, which need room.
Three sim_group_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                     const std::optional<at::Tensor>& bias, c10::SymInt n, c10::SymInt c, c10::SymInt hxw, int64_t group,
                     double eps) {
  auto own = [](const std::optional<at::Tensor>& one) {
    return one.has_value() && one->defined() ? std::optional<at::Tensor>(plain(*one)) : std::nullopt;
  };
  auto made = at::native_group_norm_symint(plain(input), own(weight), own(bias), n, c, hxw, group, eps);
  auto device = input.device();
  return {to_device(std::get<0>(made), device), to_device(std::get<1>(made), device), to_device(std::get<2>(made), device)};
}

Three sim_layer_norm(const at::Tensor& input, c10::SymIntArrayRef shape, const std::optional<at::Tensor>& weight,
                     const std::optional<at::Tensor>& bias, double eps) {
  auto own = [](const std::optional<at::Tensor>& one) {
    return one.has_value() && one->defined() ? std::optional<at::Tensor>(plain(*one)) : std::nullopt;
  };
  auto made = at::native_layer_norm_symint(plain(input), shape, own(weight), own(bias), eps);
  auto device = input.device();
  return {to_device(std::get<0>(made), device), to_device(std::get<1>(made), device), to_device(std::get<2>(made), device)};
}

// Attention in one kernel, which keeps the logarithms of its sums instead of its scores, as those of CUDA do.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>
sim_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
              const std::optional<at::Tensor>& bias, double dropout, bool causal, bool, std::optional<double> scale) {
  auto mask = bias.has_value() && bias->defined() ? std::optional<at::Tensor>(plain(*bias)) : std::nullopt;
  auto made = at::_scaled_dot_product_flash_attention_for_cpu(plain(query), plain(key), plain(value), dropout, causal,
                                                              mask, scale);
  auto device = query.device();
  return {to_device(std::get<0>(made), device), to_device(std::get<1>(made), device), at::Tensor(), at::Tensor(),
          query.sym_size(2), key.sym_size(2), at::Tensor(), at::Tensor(), at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> sim_attention_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, std::array<bool, 4>, const at::Tensor& result, const at::Tensor& sums, const at::Tensor&,
    const at::Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale) {
  auto mask = bias.defined() ? std::optional<at::Tensor>(plain(bias)) : std::nullopt;
  auto made = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      plain(gradient), plain(query), plain(key), plain(value), plain(result), plain(sums), dropout, causal, mask, scale);
  auto device = query.device();
  return {to_device(std::get<0>(made), device), to_device(std::get<1>(made), device),
          to_device(std::get<2>(made), device), at::Tensor()};
}

// Cells of recurrent layers; their backward needs what the workspace keeps, as on CUDA.
Three sim_lstm_cell(const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& cx,
                    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  auto gates = plain(input) + plain(hidden);
  if (input_bias.has_value() && input_bias->defined()) gates = gates + plain(*input_bias) + plain(*hidden_bias);
  auto parts = gates.chunk(4, 1);
  auto i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  auto cy = f * plain(cx) + i * g;
  auto device = input.device();
  return {to_device(o * cy.tanh(), device), to_device(cy, device), to_device(at::cat({i, f, g, o}, 1), device)};
}

Three sim_lstm_cell_backward(const std::optional<at::Tensor>& grad_hy, const std::optional<at::Tensor>& grad_cy,
                             const at::Tensor& cx, const at::Tensor& cy, const at::Tensor& workspace, bool has_bias) {
  auto parts = plain(workspace).chunk(4, 1);
  auto i = parts[0], f = parts[1], g = parts[2], o = parts[3];
  auto of = [&](const std::optional<at::Tensor>& one) {
    return one.has_value() && one->defined() ? plain(*one) : at::zeros_like(plain(cy));
  };
  auto wide = plain(cy).tanh();
  auto into_hy = of(grad_hy);
  auto into_cy = of(grad_cy) + into_hy * o * (1 - wide * wide);
  auto gates = at::cat({into_cy * g * i * (1 - i), into_cy * plain(cx) * f * (1 - f), into_cy * i * (1 - g * g),
                        into_hy * wide * o * (1 - o)}, 1);
  auto device = cx.device();
  return {to_device(gates, device), to_device(into_cy * f, device),
          has_bias ? to_device(gates.sum(0), device) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> sim_gru_cell(const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& hx,
                                                const std::optional<at::Tensor>& input_bias,
                                                const std::optional<at::Tensor>& hidden_bias) {
  auto given = plain(input), kept = plain(hidden);
  if (input_bias.has_value() && input_bias->defined()) {
    given = given + plain(*input_bias);
    kept = kept + plain(*hidden_bias);
  }
  auto a = given.chunk(3, 1), b = kept.chunk(3, 1);
  auto reset = (a[0] + b[0]).sigmoid(), update = (a[1] + b[1]).sigmoid(), fresh = (a[2] + reset * b[2]).tanh();
  auto workspace = at::cat({reset, update, fresh, plain(hx), b[2]}, 1);
  return {to_device(fresh + update * (plain(hx) - fresh), input.device()), to_device(workspace, input.device())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> sim_gru_cell_backward(
    const at::Tensor& gradient, const at::Tensor& workspace, bool has_bias) {
  auto parts = plain(workspace).chunk(5, 1);
  auto reset = parts[0], update = parts[1], fresh = parts[2], hx = parts[3], kept = parts[4];
  auto into = plain(gradient);
  auto of_fresh = into * (1 - update) * (1 - fresh * fresh);
  auto of_update = into * (hx - fresh) * update * (1 - update);
  auto of_reset = of_fresh * kept * reset * (1 - reset);
  auto given = at::cat({of_reset, of_update, of_fresh}, 1), hidden = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  auto device = gradient.device();
  return {to_device(given, device), to_device(hidden, device), to_device(into * update, device),
          has_bias ? to_device(given.sum(0), device) : at::Tensor(),
          has_bias ? to_device(hidden.sum(0), device) : at::Tensor()};
}

void sim_record_stream(at::Tensor&, c10::Stream) {}

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard);
namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sdp_choice)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define SIM_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FP32)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &sim_empty_strided);
  m.impl("mm", &sim_mm);
  m.impl("bmm", &sim_bmm);
  m.impl("addmm", &sim_addmm);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &sim_as_strided);
  m.impl("view", &sim_view);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &sim_resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_source_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("convolution_overrideable", &sim_convolution);
  m.impl("convolution_backward_overrideable", &sim_convolution_backward);
  m.impl("native_dropout", &sim_dropout);
  m.impl("native_dropout_backward", &sim_dropout_backward);
  m.impl("_fused_sdp_choice", &sdp_choice);
  m.impl("native_group_norm", &sim_group_norm);
  m.impl("native_layer_norm", &sim_layer_norm);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &sim_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &sim_attention_backward);
  m.impl("record_stream", &sim_record_stream);
  m.impl("_thnn_fused_lstm_cell", &sim_lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &sim_lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &sim_gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &sim_gru_cell_backward);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kSim, &allocator());
  at::RegisterPrivateUse1HooksInterface(new SimHooks());
  m.def("device_count", [] { return kDevices; });
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int index) { SimGuard().setDevice({kSim, static_cast<c10::DeviceIndex>(index)}); });
  m.def("default_generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  m.def("memory_info", [](int index) { return allocator().memory_info(index); });
  m.def("empty_cache", [] { allocator().empty_cache(); });
  m.def("reset_peak", [](int index) { allocator().reset_peak(index); });
  m.def("set_limit", [](int index, size_t limit) { allocator().set_limit(index, limit); });
  m.def("set_share", [](int index, size_t share) { allocator().set_share(index, share); });
  m.def("snapshot", [](int index) {
    std::vector<std::tuple<bool, bool, int64_t, int64_t, std::vector<std::pair<size_t, bool>>>> found;
    for (const auto& segment : allocator().snapshot(index)) {
      std::vector<std::pair<size_t, bool>> blocks;
      for (const auto& one : segment.blocks) blocks.emplace_back(one.size, one.used);
      found.emplace_back(segment.small, segment.expandable, segment.stream, segment.address, blocks);
    }
    return found;
  });
  m.def("set_idle", [](bool value) { idle = value; });
  m.def("set_expandable", [](bool value) { allocator().set_expandable(value); });
  m.def("fail_at", [](int index, int64_t number) { allocator().fail_at(index, number); });
  m.def("note", [](int index, bool value) { allocator().note(index, value); });
  m.def("noted", [](int index) {
    std::vector<std::pair<int64_t, int64_t>> found;
    for (const auto& [start, bytes] : allocator().noted(index)) found.emplace_back(reinterpret_cast<int64_t>(start), bytes);
    return found;
  });
  m.def("stats", [](int index) { return allocator().stats(index); });
  m.def("synchronize", [] { synchronisations += 1; });
  m.def("counters", [] {
    return std::map<std::string, int64_t>{
        {"to_device", copies[0]}, {"to_device_bytes", copied_bytes[0]}, {"from_device", copies[1]},
        {"from_device_bytes", copied_bytes[1]}, {"within", copies[2]}, {"within_bytes", copied_bytes[2]},
        {"synchronisations", synchronisations}, {"events", events}};
  });
}
