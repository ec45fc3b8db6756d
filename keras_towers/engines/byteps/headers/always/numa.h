// libnuma's interface for a machine with one node, where binding is a no-op.
#ifndef KERAS_TOWERS_NUMA_H_
#define KERAS_TOWERS_NUMA_H_

struct bitmask;

static bitmask *const numa_all_nodes_ptr = nullptr;
static bitmask *const numa_no_nodes_ptr = nullptr;

// The highest node number.
inline int numa_max_node() { return 0; }
inline bitmask *numa_parse_nodestring(const char *) { return nullptr; }
inline void numa_bind(bitmask *) {}
inline void numa_set_interleave_mask(bitmask *) {}
inline void numa_set_preferred(int) {}

#endif  // KERAS_TOWERS_NUMA_H_
