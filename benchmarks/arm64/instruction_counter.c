// A plugin of QEMU 5 to 8 that counts the instructions of a program, and prints their number on stderr at its end.
// Debian has no header of the plugin interface, so what this file uses of it is declared here.
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb; // a block of instructions that are executed together

void qemu_plugin_register_vcpu_tb_trans_cb(
    qemu_plugin_id_t id, void (*callback)(qemu_plugin_id_t id, struct qemu_plugin_tb* block));
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb* block);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb* block, int operation, void* counter, uint64_t n);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, void (*callback)(qemu_plugin_id_t id, void* data), void* data);

#define EXPORT __attribute__((visibility("default")))
EXPORT int qemu_plugin_version = 1;

static uint64_t count;

static void on_block(qemu_plugin_id_t id, struct qemu_plugin_tb* block) {
  (void)id;
  const int kAdd = 0;
  qemu_plugin_register_vcpu_tb_exec_inline(block, kAdd, &count, qemu_plugin_tb_n_insns(block));
}

static void on_end(qemu_plugin_id_t id, void* data) {
  (void)id;
  (void)data;
  fprintf(stderr, "%" PRIu64 "\n", count);
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const void* info, int argc, char** argv) {
  (void)info;
  (void)argc;
  (void)argv;
  qemu_plugin_register_vcpu_tb_trans_cb(id, on_block);
  qemu_plugin_register_atexit_cb(id, on_end, NULL);
  return 0;
}
