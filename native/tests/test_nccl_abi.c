/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plugin's file: it loads from plain C, exports five tables and nothing else, and is gone when it is closed. What the tables
 * do is for other tests; their layouts are pinned where they are declared.
 */
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>
/* clang-format on */

#include "nccl/abi.h"

static const char *const tables[] = {
	"ncclNetPlugin_v8", "ncclNetPlugin_v9", "ncclNetPlugin_v10", "ncclNetPlugin_v11", "ncclNetPlugin_v12",
};
#define TABLES (sizeof tables / sizeof tables[0])

static const char *plugin_path(void)
{
	const char *path = getenv("DQ_TEST_NCCL_PLUGIN");

	if (!path)
		fail_msg("the environment variable DQ_TEST_NCCL_PLUGIN must name the plugin");
	return path;
}

/* --- the file ------------------------------------------------------------------------------------------------------- */

struct file {
	unsigned char *bytes;
	size_t size;
};

static struct file map_file(const char *path)
{
	struct file f;
	struct stat st;
	const int fd = open(path, O_RDONLY | O_CLOEXEC);

	assert_true(fd >= 0);
	assert_int_equal(fstat(fd, &st), 0);
	f.size = (size_t)st.st_size;
	f.bytes = mmap(NULL, f.size, PROT_READ, MAP_PRIVATE, fd, 0);
	assert_true(f.bytes != MAP_FAILED);
	close(fd);
	return f;
}

static const void *at(const struct file *f, uint64_t offset, uint64_t bytes)
{
	assert_true(offset <= f->size && bytes <= f->size - offset);
	return f->bytes + offset;
}

static const ElfW(Shdr) *section(const struct file *f, uint32_t type)
{
	const ElfW(Ehdr) *header = at(f, 0, sizeof *header);
	const ElfW(Shdr) *sections;

	assert_memory_equal(header->e_ident, ELFMAG, SELFMAG);
	sections = at(f, header->e_shoff, (uint64_t)header->e_shnum * sizeof *sections);
	for (unsigned i = 0; i < header->e_shnum; i++)
		if (sections[i].sh_type == type)
			return &sections[i];
	fail_msg("no section of type %u", type);
	return NULL;
}

static void test_exports(void **state)
{
	struct file f = map_file(plugin_path());
	const ElfW(Ehdr) *header = at(&f, 0, sizeof *header);
	const ElfW(Shdr) *symbols = section(&f, SHT_DYNSYM);
	const ElfW(Shdr) *sections = at(&f, header->e_shoff, (uint64_t)header->e_shnum * sizeof *sections);
	const ElfW(Shdr) *names = &sections[symbols->sh_link];
	const size_t count = symbols->sh_size / sizeof(ElfW(Sym));
	const ElfW(Sym) *table = at(&f, symbols->sh_offset, symbols->sh_size);
	unsigned found = 0;

	(void)state;
	for (size_t i = 0; i < count; i++) {
		const char *name = at(&f, names->sh_offset + table[i].st_name, 1);
		bool known = false;

		if (table[i].st_shndx == SHN_UNDEF || ELF64_ST_BIND(table[i].st_info) == STB_LOCAL)
			continue;
		for (size_t k = 0; k < TABLES; k++)
			known |= strcmp(name, tables[k]) == 0;
		if (!known)
			fail_msg("the plugin exports %s", name);
		assert_int_equal(ELF64_ST_TYPE(table[i].st_info), STT_OBJECT);
		found++;
	}
	assert_int_equal(found, TABLES);
	munmap(f.bytes, f.size);
}

/* --- loaded --------------------------------------------------------------------------------------------------------- */

static bool mapped(const char *words)
{
	char line[512];
	bool found = false;
	FILE *maps = fopen("/proc/self/maps", "re");

	assert_non_null(maps);
	while (fgets(line, sizeof line, maps))
		found |= strstr(line, words) != NULL;
	fclose(maps);
	return found;
}

static void *load(void)
{
	void *library = dlopen(plugin_path(), RTLD_NOW | RTLD_LOCAL);

	if (!library)
		fail_msg("%s", dlerror());
	return library;
}

#define CHECK_COMMON(net)                          \
	do {                                       \
		assert_non_null(net);              \
		assert_string_equal((net)->name, "dqplb"); \
		assert_non_null((net)->init);      \
		assert_non_null((net)->devices);   \
		assert_non_null((net)->get_properties); \
		assert_non_null((net)->listen);    \
		assert_non_null((net)->connect);   \
		assert_non_null((net)->accept);    \
		assert_non_null((net)->reg_mr);    \
		assert_non_null((net)->reg_mr_dmabuf); \
		assert_non_null((net)->dereg_mr);  \
		assert_non_null((net)->isend);     \
		assert_non_null((net)->irecv);     \
		assert_non_null((net)->iflush);    \
		assert_non_null((net)->test);      \
		assert_non_null((net)->close_send); \
		assert_non_null((net)->close_recv); \
		assert_non_null((net)->close_listen); \
		assert_null((net)->get_device_mr); \
		assert_null((net)->recv_consumed); \
	} while (0)

static void test_tables(void **state)
{
	void *library = load();
	const struct dq_nccl_net_v8 *v8 = dlsym(library, tables[0]);
	const struct dq_nccl_net_v9 *v9 = dlsym(library, tables[1]);
	const struct dq_nccl_net_v10 *v10 = dlsym(library, tables[2]);
	const struct dq_nccl_net_v11 *v11 = dlsym(library, tables[3]);
	const struct dq_nccl_net_v12 *v12 = dlsym(library, tables[4]);

	(void)state;
	CHECK_COMMON(v8);
	CHECK_COMMON(v9);
	CHECK_COMMON(v10);
	CHECK_COMMON(v11);
	CHECK_COMMON(v12);
	assert_null(v9->make_vdevice);
	assert_null(v10->make_vdevice);
	assert_null(v11->make_vdevice);
	assert_null(v12->make_vdevice);
	assert_non_null(v11->finalize);
	assert_non_null(v12->finalize);
	assert_non_null(v11->set_attr);
	assert_non_null(v12->set_attr);
	assert_int_equal(dlclose(library), 0);
}

/* Nothing keeps it: no thread, no handler at exit, no thread-local object with a destructor. */
static void test_unloading(void **state)
{
	(void)state;
	for (int i = 0; i < 3; i++) {
		void *library = load();
		assert_true(mapped("libnccl-net-dqplb.so"));
		assert_true(mapped("libdqplb.so"));
		assert_int_equal(dlclose(library), 0);
		assert_false(mapped("libnccl-net-dqplb.so"));
		assert_false(mapped("libdqplb.so"));
	}
}

/* --- without a daemon ----------------------------------------------------------------------------------------------- */

static char warning[2048];

__attribute__((format(printf, 5, 6))) static void logger(int level, unsigned long flags, const char *file, int line, const char *format,
							 ...)
{
	va_list ap;

	(void)flags;
	(void)file;
	(void)line;
	if (level != DQ_NCCL_LOG_WARN)
		return;
	va_start(ap, format);
	vsnprintf(warning, sizeof warning, format, ap);
	va_end(ap);
}

/* It says which socket was tried and which unit to start, and can be closed as if it had never been loaded. */
static void test_no_daemon(void **state)
{
	void *library;
	void *context = warning;

	(void)state;
	setenv("DQPLB_SOCKET", "/nonexistent/dqplbd/client.sock", 1);
	for (int version = 8; version <= 12; version++) {
		char symbol[32];
		const void *net;
		int rc;

		warning[0] = 0;
		library = load();
		snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", version);
		net = dlsym(library, symbol);
		assert_non_null(net);
		if (version < 10)
			rc = ((const struct dq_nccl_net_v8 *)net)->init(logger); /* the head is the same */
		else if (version == 10)
			rc = ((const struct dq_nccl_net_v10 *)net)->init(logger, NULL);
		else
			rc = ((const struct dq_nccl_net_v11 *)net)->init(&context, 1, NULL, logger, NULL);
		assert_int_equal(rc, DQ_NCCL_SYSTEM_ERROR);
		assert_non_null(strstr(warning, "/nonexistent/dqplbd/client.sock"));
		assert_non_null(strstr(warning, "systemctl start dqplbd"));
		if (version >= 11) {
			assert_null(context);
			/* The library calls it after a failure, too. */
			assert_int_equal(((const struct dq_nccl_net_v11 *)net)->finalize(context), DQ_NCCL_SUCCESS);
		}
		assert_int_equal(dlclose(library), 0);
		assert_false(mapped("libdqplb.so"));
		context = warning;
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_exports),
		cmocka_unit_test(test_tables),
		cmocka_unit_test(test_unloading),
		cmocka_unit_test(test_no_daemon),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
