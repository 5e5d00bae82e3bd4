/* SPDX-License-Identifier: Apache-2.0 */
#include "provider/fault.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "provider/tcp.h"
#include "provider/verbs_table.h"

enum rule_kind { RULE_DELAY, RULE_LOSE, RULE_FAIL_QP, RULE_PORT_DOWN, RULE_PORT_UP, RULE_REFUSE };

#define OP_ANY 0xffu
#define HELD 4096u /* delayed completions of a device; what does not fit stays in the base. A power of two */

struct rule {
	uint64_t time_ns;
	uint64_t nth, count;           /* of the occurrences */
	uint64_t seen;
	uint64_t after;
	uint32_t qp;
	uint8_t kind;
	uint8_t op;
	bool fired;
};

struct fault_qp {
	struct fault_qp *next, *prev;
	struct fault_device *dev;
	struct dq_qp *base;
	void *ctx;                     /* the caller's */
	uint32_t number;               /* in order of creation */
	uint64_t posted;
	bool connected;
	bool made_to_fail;             /* the completion says "gone" rather than "fenced" */
};

struct held {
	struct dq_wc wc;
	struct fault_qp *qp;
	uint64_t due_ns;
};

struct fault_device {
	const struct dq_provider *base;
	struct dq_device *dev;
	char name[32];
	struct rule rules[DQ_FAULT_RULES];
	unsigned rules_used;
	struct fault_qp qps;           /* head of the ring */
	uint32_t created;
	uint64_t posted;
	atomic_bool down;              /* also read by the thread of the datagram endpoint */
	bool down_told;
	struct held *held;             /* completions on their way to the caller: a ring of HELD */
	uint32_t held_head, held_tail;
	uint64_t held_last_ns;
	struct dq_fault_stats stats;
};

struct fault_dgram {
	struct fault_device *dev;
	struct dq_dgram *base;
};

static struct fault_device *device_of(struct dq_device *d) { return (struct fault_device *)(void *)d; }
static const struct fault_device *device_of_const(const struct dq_device *d)
{
	return (const struct fault_device *)(const void *)d;
}
static struct fault_qp *qp_of(struct dq_qp *q) { return (struct fault_qp *)(void *)q; }
static struct fault_dgram *dgram_of(struct dq_dgram *d) { return (struct fault_dgram *)(void *)d; }
static const struct fault_dgram *dgram_of_const(const struct dq_dgram *d) { return (const struct fault_dgram *)(const void *)d; }

static uint64_t now_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* ---- scripts ---- */

static bool parse_number(const char *text, uint64_t *out)
{
	char *end;
	if (*text < '0' || *text > '9')
		return false;
	errno = 0;
	*out = strtoull(text, &end, 10);
	return !errno && !*end;
}

static bool parse_time(const char *text, uint64_t *out)
{
	static const struct { const char *unit; uint64_t ns; } units[] = {{"ns", 1}, {"us", 1000}, {"ms", 1000000}, {"s", 1000000000}};
	char *end;
	if (*text < '0' || *text > '9')
		return false;
	errno = 0;
	const uint64_t n = strtoull(text, &end, 10);
	for (size_t i = 0; i < sizeof units / sizeof *units; i++)
		if (!errno && strcmp(end, units[i].unit) == 0 && n <= UINT64_MAX / 4 / units[i].ns) {
			*out = n * units[i].ns;
			return true;
		}
	return false;
}

static bool parse_op(const char *text, uint8_t *out)
{
	static const struct { const char *name; uint8_t op; } ops[] = {
		{"write", DQ_WC_WRITE}, {"send", DQ_WC_SEND}, {"recv", DQ_WC_RECV}, {"segment", DQ_WC_SEGMENT}, {"any", OP_ANY}};
	for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
		if (strcmp(text, ops[i].name) == 0) {
			*out = ops[i].op;
			return true;
		}
	return false;
}

/* Which words a rule may have. */
enum word { WORD_TIME = 1, WORD_OP = 2, WORD_NTH = 4, WORD_COUNT = 8, WORD_QP = 16, WORD_AFTER = 32 };

static const struct {
	const char *name;
	uint8_t kind;
	unsigned allowed, required;
	uint64_t count;
} rule_kinds[] = {
	{"delay", RULE_DELAY, WORD_TIME | WORD_OP | WORD_NTH | WORD_COUNT, WORD_TIME, UINT64_MAX},
	{"lose", RULE_LOSE, WORD_OP | WORD_NTH | WORD_COUNT, WORD_OP, 1},
	{"fail-qp", RULE_FAIL_QP, WORD_QP | WORD_AFTER, WORD_QP, 1},
	{"port-down", RULE_PORT_DOWN, WORD_AFTER, 0, 1},
	{"port-up", RULE_PORT_UP, 0, 0, 1},
	{"refuse-registration", RULE_REFUSE, WORD_NTH | WORD_COUNT, 0, 1},
};

/* One rule, its text is taken apart. 1: it is for this device, 0: for another or empty. */
static int parse_rule(const struct fault_device *dev, char *text, struct rule *rule, struct dq_error *err)
{
	char *save = NULL, *word = strtok_r(text, " \t\n", &save);
	size_t k = 0;
	unsigned seen = 0;
	bool mine = true;

	if (!word)
		return 0;
	while (k < sizeof rule_kinds / sizeof *rule_kinds && strcmp(word, rule_kinds[k].name) != 0)
		k++;
	if (k == sizeof rule_kinds / sizeof *rule_kinds)
		return dq_error_set(err, -EINVAL, "fault script: \"%s\" is no rule; expected delay, lose, fail-qp, port-down, port-up or "
				    "refuse-registration", word);
	*rule = (struct rule){.kind = rule_kinds[k].kind, .op = OP_ANY, .nth = 1, .count = rule_kinds[k].count};
	while ((word = strtok_r(NULL, " \t\n", &save))) {
		uint64_t n = 0;
		unsigned which = 0;
		bool good = false;
		if (strncmp(word, "device=", 7) == 0) {
			mine = strcmp(word + 7, dev->name) == 0;
			continue;
		}
		if (strncmp(word, "op=", 3) == 0) {
			which = WORD_OP;
			good = parse_op(word + 3, &rule->op);
		} else if (strncmp(word, "nth=", 4) == 0) {
			which = WORD_NTH;
			good = parse_number(word + 4, &rule->nth) && rule->nth > 0;
		} else if (strncmp(word, "count=", 6) == 0) {
			which = WORD_COUNT;
			good = parse_number(word + 6, &rule->count) && rule->count > 0;
		} else if (strncmp(word, "qp=", 3) == 0) {
			which = WORD_QP;
			good = parse_number(word + 3, &n) && n < UINT32_MAX;
			rule->qp = (uint32_t)n;
		} else if (strncmp(word, "after=", 6) == 0) {
			which = WORD_AFTER;
			good = parse_number(word + 6, &rule->after);
		} else {
			which = WORD_TIME;
			good = parse_time(word, &rule->time_ns);
		}
		if (!good || !(rule_kinds[k].allowed & which))
			return dq_error_set(err, -EINVAL, "fault script: \"%s\" is not understood in a rule \"%s\"", word, rule_kinds[k].name);
		seen |= which;
	}
	if ((seen & rule_kinds[k].required) != rule_kinds[k].required)
		return dq_error_set(err, -EINVAL, "fault script: rule \"%s\" needs its %s", rule_kinds[k].name,
				    rule_kinds[k].kind == RULE_DELAY ? "time, such as 5ms" : rule_kinds[k].kind == RULE_LOSE ? "op=" : "qp=");
	return mine;
}

static bool occurs(struct rule *rule)
{
	const uint64_t n = ++rule->seen;
	return n >= rule->nth && n - rule->nth < rule->count;
}

static void qp_break(struct fault_qp *qp)
{
	if (qp->made_to_fail)
		return;
	qp->made_to_fail = true;
	qp->dev->stats.failed_qps++;
	qp->dev->base->qp_fence(qp->base);
}

/* What is due because of what was posted so far. */
static void check_posted(struct fault_device *dev)
{
	for (unsigned i = 0; i < dev->rules_used; i++) {
		struct rule *r = &dev->rules[i];
		if (r->fired)
			continue;
		if (r->kind == RULE_FAIL_QP) {
			for (struct fault_qp *qp = dev->qps.next; qp != &dev->qps; qp = qp->next)
				if (qp->number == r->qp && qp->connected && qp->posted >= r->after) {
					r->fired = true;
					qp_break(qp);
				}
		} else if (r->kind == RULE_PORT_DOWN && dev->posted >= r->after) {
			r->fired = true;
			atomic_store(&dev->down, true);
			for (struct fault_qp *qp = dev->qps.next; qp != &dev->qps; qp = qp->next)
				qp_break(qp);
		}
	}
}

int dq_fault_script(struct dq_device *device, const char *script, struct dq_error *err)
{
	struct fault_device *dev = device_of(device);
	struct rule rules[DQ_FAULT_RULES];
	unsigned used = 0;
	char *copy = strdup(script ? script : ""), *save = NULL;
	int rc = copy ? 0 : dq_error_set(err, -ENOMEM, "fault script: no memory");

	for (char *text = copy ? strtok_r(copy, ";", &save) : NULL; text && rc >= 0; text = strtok_r(NULL, ";", &save)) {
		struct rule rule;
		rc = parse_rule(dev, text, &rule, err);
		if (rc == 1 && used == DQ_FAULT_RULES)
			rc = dq_error_set(err, -EINVAL, "fault script: more than %u rules", DQ_FAULT_RULES);
		else if (rc == 1)
			rules[used++] = rule;
	}
	free(copy);
	if (rc < 0)
		return rc;
	memcpy(dev->rules, rules, used * sizeof *rules);
	dev->rules_used = used;
	for (unsigned i = 0; i < used; i++) {
		/* "after" counts from here */
		if (rules[i].kind == RULE_PORT_DOWN)
			dev->rules[i].after += dev->posted;
		if (rules[i].kind == RULE_FAIL_QP)
			for (const struct fault_qp *qp = dev->qps.next; qp != &dev->qps; qp = qp->next)
				if (qp->number == rules[i].qp)
					dev->rules[i].after += qp->posted;
		if (rules[i].kind == RULE_PORT_UP)
			atomic_store(&dev->down, false);
	}
	check_posted(dev);
	return 0;
}

void dq_fault_stats(const struct dq_device *dev, struct dq_fault_stats *out)
{
	*out = device_of_const(dev)->stats;
}

/* ---- device ---- */

static int fault_device_open(const struct dq_provider *base, const struct dq_device_config *cfg, struct dq_device **out,
			     struct dq_error *err)
{
	struct fault_device *dev = calloc(1, sizeof *dev);
	if (!dev)
		return dq_error_set(err, -ENOMEM, "device %.31s: no memory", cfg->name);
	dev->base = base;
	snprintf(dev->name, sizeof dev->name, "%.31s", cfg->name);
	dev->qps.next = dev->qps.prev = &dev->qps;
	dev->held = calloc(HELD, sizeof *dev->held);
	int rc = dev->held ? 0 : dq_error_set(err, -ENOMEM, "device %.31s: no memory", cfg->name);
	if (!rc)
		rc = dq_fault_script((struct dq_device *)(void *)dev, getenv("DQPLBD_FAULT"), err);
	if (!rc)
		rc = base->device_open(cfg, &dev->dev, err);
	if (rc) {
		free(dev->held);
		free(dev);
		return rc;
	}
	*out = (struct dq_device *)(void *)dev;
	return 0;
}

static void fault_qp_destroy(struct dq_qp *q);

static void fault_device_close(struct dq_device *d)
{
	if (!d)
		return;
	struct fault_device *dev = device_of(d);
	while (dev->qps.next != &dev->qps)
		fault_qp_destroy((struct dq_qp *)(void *)dev->qps.next);
	dev->base->device_close(dev->dev);
	free(dev->held);
	free(dev);
}

static void fault_device_query(struct dq_device *d, struct dq_device_attr *out)
{
	struct fault_device *dev = device_of(d);
	dev->base->device_query(dev->dev, out);
	out->up &= !atomic_load(&dev->down);
}

static int fault_device_event(struct dq_device *d, struct dq_device_event *out)
{
	struct fault_device *dev = device_of(d);
	const bool down = atomic_load(&dev->down);
	if (down != dev->down_told) {
		dev->down_told = down;
		*out = (struct dq_device_event){.change = down ? DQ_DEVICE_DOWN : DQ_DEVICE_UP, .port = 1};
		snprintf(out->text, sizeof out->text, "fault script: port-%s", down ? "down" : "up");
		return 1;
	}
	return dev->base->device_event ? dev->base->device_event(dev->dev, out) : 0;
}

static int fault_device_readdress(struct dq_device *d, const char *address, struct dq_error *err)
{
	struct fault_device *dev = device_of(d);
	return dev->base->device_readdress(dev->dev, address, err);
}

static int fault_mem_register(struct dq_device *d, const struct dq_mem_desc *desc, struct dq_mem **out, struct dq_error *err)
{
	struct fault_device *dev = device_of(d);
	bool refuse = false;

	for (unsigned i = 0; i < dev->rules_used; i++)
		refuse |= dev->rules[i].kind == RULE_REFUSE && occurs(&dev->rules[i]);
	if (refuse) {
		dev->stats.refused++;
		return dq_error_set(err, -ENOMEM, "device %s: registration of %llu bytes refused by the fault script", dev->name,
				    (unsigned long long)desc->len);
	}
	return dev->base->mem_register(dev->dev, desc, out, err);
}

/* ---- completions ---- */

static bool op_matches(const struct rule *rule, const struct dq_wc *wc)
{
	return rule->op == OP_ANY || rule->op == wc->op;
}

/* Take what the base has, and put it in line with its due time. */
static void take_in(struct fault_device *dev)
{
	struct dq_wc wc[64];
	const uint32_t room = HELD - (dev->held_tail - dev->held_head);
	const int n = dev->base->poll(dev->dev, wc, DQ_MIN(room, 64u));
	const uint64_t now = n > 0 ? now_ns() : 0;

	for (int i = 0; i < n; i++) {
		struct fault_qp *qp = wc[i].ctx;
		uint64_t due = now;
		bool lost = false;

		wc[i].ctx = qp->ctx;
		if (wc[i].op == DQ_WC_CONNECTED) {
			qp->connected = true;
		} else if (wc[i].op == DQ_WC_FAILED) {
			if (qp->made_to_fail) {
				wc[i].status = DQ_WC_REMOTE_GONE;
				wc[i].vendor = ECONNRESET;
			}
		} else if (wc[i].status == DQ_WC_SUCCESS) {
			for (unsigned k = 0; k < dev->rules_used; k++) {
				struct rule *r = &dev->rules[k];
				if (r->kind == RULE_DELAY && op_matches(r, &wc[i]) && occurs(r)) {
					due = DQ_MAX(due, now + r->time_ns);
					dev->stats.delayed++;
				} else if (r->kind == RULE_LOSE && op_matches(r, &wc[i]) && occurs(r)) {
					lost = true;
				}
			}
		}
		if (lost) {
			dev->stats.lost++;
			continue;
		}
		dev->held_last_ns = DQ_MAX(dev->held_last_ns, due); /* nothing overtakes */
		dev->held[dev->held_tail++ % HELD] = (struct held){wc[i], qp, dev->held_last_ns};
	}
	if (n > 0)
		check_posted(dev); /* a QP that is to fail as soon as it is connected */
}

static int fault_poll(struct dq_device *d, struct dq_wc *out, unsigned n)
{
	struct fault_device *dev = device_of(d);
	unsigned taken = 0;

	take_in(dev);
	const uint64_t now = now_ns();
	while (taken < n && dev->held_head != dev->held_tail && dev->held[dev->held_head % HELD].due_ns <= now)
		out[taken++] = dev->held[dev->held_head++ % HELD].wc;
	return (int)taken;
}

static int fault_arm(struct dq_device *d)
{
	const struct fault_device *dev = device_of(d);
	if (dev->held_head != dev->held_tail && dev->held[dev->held_head % HELD].due_ns <= now_ns())
		return 1;
	return dev->base->arm(dev->dev);
}

static int fault_event_fd(const struct dq_device *d)
{
	const struct fault_device *dev = device_of_const(d);
	return dev->base->event_fd(dev->dev);
}

static uint64_t fault_next_deadline(const struct dq_device *d)
{
	const struct fault_device *dev = device_of_const(d);
	const uint64_t base = dev->base->next_deadline(dev->dev);
	return dev->held_head != dev->held_tail ? DQ_MIN(base, dev->held[dev->held_head % HELD].due_ns) : base;
}

/* ---- queue pairs ---- */

static int fault_qp_create(struct dq_device *d, const struct dq_qp_attr *attr, struct dq_qp **out, struct dq_error *err)
{
	struct fault_device *dev = device_of(d);
	struct dq_qp_attr own = *attr;
	struct fault_qp *qp = calloc(1, sizeof *qp);

	if (!qp)
		return dq_error_set(err, -ENOMEM, "device %s: no memory for a QP", dev->name);
	qp->dev = dev;
	qp->ctx = attr->ctx;
	own.ctx = qp;
	int rc = dev->base->qp_create(dev->dev, &own, &qp->base, err);
	if (rc) {
		free(qp);
		return rc;
	}
	qp->number = dev->created++;
	qp->next = &dev->qps;
	qp->prev = dev->qps.prev;
	qp->prev->next = qp;
	dev->qps.prev = qp;
	*out = (struct dq_qp *)(void *)qp;
	return 0;
}

static void fault_qp_endpoint(const struct dq_qp *q, struct dq_endpoint *out)
{
	const struct fault_qp *qp = (const struct fault_qp *)(const void *)q;
	qp->dev->base->qp_endpoint(qp->base, out);
}

static int fault_qp_connect(struct dq_qp *q, const struct dq_endpoint *peer, bool dial, struct dq_error *err)
{
	struct fault_qp *qp = qp_of(q);
	if (atomic_load(&qp->dev->down)) {
		qp_break(qp); /* told by the completion, as a connection that cannot be made is */
		return 0;
	}
	return qp->dev->base->qp_connect(qp->base, peer, dial, err);
}

static void fault_qp_fence(struct dq_qp *q)
{
	qp_of(q)->dev->base->qp_fence(qp_of(q)->base);
}

static void fault_qp_destroy(struct dq_qp *q)
{
	if (!q)
		return;
	struct fault_qp *qp = qp_of(q);
	struct fault_device *dev = qp->dev;
	uint32_t to = dev->held_head;

	dev->base->qp_destroy(qp->base);
	for (uint32_t i = dev->held_head; i != dev->held_tail; i++)
		if (dev->held[i % HELD].qp != qp)
			dev->held[to++ % HELD] = dev->held[i % HELD];
	dev->held_tail = to;
	qp->prev->next = qp->next;
	qp->next->prev = qp->prev;
	free(qp);
}

static int posted(struct fault_qp *qp, int n)
{
	if (n > 0) {
		qp->posted += (uint64_t)n;
		qp->dev->posted += (uint64_t)n;
		check_posted(qp->dev);
	}
	return n;
}

/* How many of n may be posted before a rule strikes, so that "after" is exact also within a batch. */
static unsigned until_strike(const struct fault_qp *qp, unsigned n)
{
	const struct fault_device *dev = qp->dev;
	for (unsigned i = 0; i < dev->rules_used; i++) {
		const struct rule *r = &dev->rules[i];
		if (r->kind == RULE_FAIL_QP && !r->fired && r->qp == qp->number && r->after > qp->posted)
			n = (unsigned)DQ_MIN((uint64_t)n, r->after - qp->posted);
		else if (r->kind == RULE_PORT_DOWN && !r->fired && r->after > dev->posted)
			n = (unsigned)DQ_MIN((uint64_t)n, r->after - dev->posted);
	}
	return n;
}

static int fault_post_write(struct dq_qp *q, const struct dq_write *wr, unsigned n)
{
	struct fault_qp *qp = qp_of(q);
	return posted(qp, qp->dev->base->post_write(qp->base, wr, until_strike(qp, n)));
}

static int fault_post_send(struct dq_qp *q, const struct dq_send *wr, unsigned n)
{
	struct fault_qp *qp = qp_of(q);
	return posted(qp, qp->dev->base->post_send(qp->base, wr, until_strike(qp, n)));
}

static int fault_post_recv(struct dq_qp *q, const struct dq_recv *wr, unsigned n)
{
	return qp_of(q)->dev->base->post_recv(qp_of(q)->base, wr, n);
}

/* ---- datagrams ---- */

static int fault_dgram_open(struct dq_device *d, struct dq_dgram **out, struct dq_error *err)
{
	struct fault_device *dev = device_of(d);
	struct fault_dgram *dg = calloc(1, sizeof *dg);

	if (!dg)
		return dq_error_set(err, -ENOMEM, "device %s: no memory for datagrams", dev->name);
	dg->dev = dev;
	int rc = dev->base->dgram_open(dev->dev, &dg->base, err);
	if (rc) {
		free(dg);
		return rc;
	}
	*out = (struct dq_dgram *)(void *)dg;
	return 0;
}

static void fault_dgram_close(struct dq_dgram *d)
{
	if (!d)
		return;
	dgram_of(d)->dev->base->dgram_close(dgram_of(d)->base);
	free(dgram_of(d));
}

static void fault_dgram_endpoint(const struct dq_dgram *d, struct dq_endpoint *out)
{
	dgram_of_const(d)->dev->base->dgram_endpoint(dgram_of_const(d)->base, out);
}

static int fault_dgram_send(struct dq_dgram *d, const struct dq_endpoint *to, uint32_t flow_label, struct dq_link *link, uint64_t id,
			    const void *data, uint16_t len)
{
	const struct fault_dgram *dg = dgram_of(d);
	if (atomic_load(&dg->dev->down))
		return -ENETDOWN;
	return dg->dev->base->dgram_send(dg->base, to, flow_label, link, id, data, len);
}

static int fault_dgram_poll(struct dq_dgram *d, struct dq_dgram_event *out, unsigned n)
{
	const struct fault_dgram *dg = dgram_of(d);
	int taken = dg->dev->base->dgram_poll(dg->base, out, n), kept = 0;

	if (!atomic_load(&dg->dev->down))
		return taken;
	for (int i = 0; i < taken; i++)
		if (out[i].kind != DQ_DGRAM_RECEIVED)
			out[kept++] = out[i];
	return kept;
}

static int fault_dgram_fd(const struct dq_dgram *d)
{
	return dgram_of_const(d)->dev->base->dgram_fd(dgram_of_const(d)->base);
}

static uint64_t fault_dgram_next_deadline(const struct dq_dgram *d)
{
	return dgram_of_const(d)->dev->base->dgram_next_deadline(dgram_of_const(d)->base);
}

static const char *fault_dgram_time_source(const struct dq_dgram *d)
{
	return dgram_of_const(d)->dev->base->dgram_time_source(dgram_of_const(d)->base);
}

static uint64_t fault_dgram_correction_ns(const struct dq_dgram *d)
{
	const struct fault_dgram *dg = dgram_of_const(d);
	return dg->dev->base->dgram_correction_ns ? dg->dev->base->dgram_correction_ns(dg->base) : 0;
}

/* ---- tables: one a base, since opening a device has nothing else to know its base by ---- */

static int open_tcp(const struct dq_device_config *cfg, struct dq_device **out, struct dq_error *err)
{
	return fault_device_open(&dq_provider_tcp, cfg, out, err);
}

static int open_verbs(const struct dq_device_config *cfg, struct dq_device **out, struct dq_error *err)
{
	return fault_device_open(&dq_provider_verbs, cfg, out, err);
}

static struct {
	const struct dq_provider *base;
	const char *name;
	int (*open)(const struct dq_device_config *cfg, struct dq_device **out, struct dq_error *err);
	struct dq_provider table;
} wrapped[] = {
	{.base = &dq_provider_tcp, .name = "fault:tcp", .open = open_tcp},
	{.base = &dq_provider_verbs, .name = "fault:verbs", .open = open_verbs},
};

static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static void make_tables(void)
{
	for (size_t i = 0; i < sizeof wrapped / sizeof *wrapped; i++) {
		struct dq_provider *t = &wrapped[i].table;
		*t = *wrapped[i].base; /* memory objects are the base's own: their functions stay */
		t->name = wrapped[i].name;
		t->mem_any_thread = t->qp_any_thread = false; /* the rules and what they count belong to one thread */
		t->device_open = wrapped[i].open;
		t->device_close = fault_device_close;
		t->device_query = fault_device_query;
		t->device_event = fault_device_event;
		if (t->device_readdress)
			t->device_readdress = fault_device_readdress;
		t->mem_register = fault_mem_register;
		t->qp_create = fault_qp_create;
		t->qp_endpoint = fault_qp_endpoint;
		t->qp_connect = fault_qp_connect;
		t->qp_fence = fault_qp_fence;
		t->qp_destroy = fault_qp_destroy;
		t->post_write = fault_post_write;
		t->post_send = fault_post_send;
		t->post_recv = fault_post_recv;
		t->poll = fault_poll;
		t->arm = fault_arm;
		t->event_fd = fault_event_fd;
		t->next_deadline = fault_next_deadline;
		t->dgram_open = fault_dgram_open;
		t->dgram_close = fault_dgram_close;
		t->dgram_endpoint = fault_dgram_endpoint;
		t->dgram_send = fault_dgram_send;
		t->dgram_poll = fault_dgram_poll;
		t->dgram_fd = fault_dgram_fd;
		t->dgram_next_deadline = fault_dgram_next_deadline;
		t->dgram_time_source = fault_dgram_time_source;
		t->dgram_correction_ns = fault_dgram_correction_ns;
	}
}

const struct dq_provider *dq_fault_find(const char *base)
{
	pthread_once(&tables_once, make_tables);
	for (size_t i = 0; i < sizeof wrapped / sizeof *wrapped; i++)
		if (strcmp(wrapped[i].base->name, base) == 0)
			return &wrapped[i].table;
	return NULL;
}
