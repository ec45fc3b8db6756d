"""Several optimizers and networks, gradients of gradients, draws and codes."""

import keras
import numpy as np
import tensorflow as tf

from tests.partition.cases import table as t


def _minimize(optimizer, tape, loss, net):
    weights = net.trainable_weights
    optimizer.apply(tape.gradient(loss, weights), weights)


def _train_a_gan(m, x, y):
    n = t.rows(x)
    for number in range(2):
        z = tf.random.stateless_normal([n, 6], [number, 1])
        with tf.GradientTape() as tape:
            critic = _critic_with_penalty(m.critic, x, m.net(z))
        _minimize(m.others[0], tape, critic, m.critic)
    z = tf.random.stateless_normal([n, 6], [5, 1])
    with tf.GradientTape() as tape:
        loss = -tf.reduce_mean(m.critic(m.net(z)))
    _minimize(m.optimizer, tape, loss, m.net)
    return {"loss": loss, "critic": critic}


def _critic_with_penalty(critic, x, fake):
    alpha = tf.random.stateless_uniform([t.rows(x), 1], [9, 1])
    mixed = x + alpha * (fake - x)
    with tf.GradientTape() as tape:
        tape.watch(mixed)
        score = critic(mixed)
    slope = tape.gradient(score, mixed)
    norm = tf.sqrt(tf.reduce_sum(slope**2, 1) + 1e-8)
    lost = tf.reduce_mean(critic(fake)) - tf.reduce_mean(critic(x))
    return lost + 10 * tf.reduce_mean((norm - 1) ** 2)


@t.compiled_model()
def wgan_gp():
    nets = {"net": t.mlp(8, 6)(), "critic": t.mlp(8, 1)()}
    optimizer = keras.optimizers.RMSprop(0.01)
    return t.compiled(t.ByHand(_train_a_gan, others=[optimizer], **nets))


@t.step(net=t.mlp(8, 2), factors=lambda: keras.Variable([1.0, 1.0]))
def gradnorm(m, x, y):
    shared = m.net.layers[0].kernel
    with tf.GradientTape(persistent=True) as outer:
        with tf.GradientTape(persistent=True) as tape:
            p = m.net(x)
            tasks = [
                tf.reduce_mean((p[:, :1] - y) ** 2),
                tf.reduce_mean(tf.abs(p[:, 1:] - y**2)),
            ]
            weighed = [m.factors[i] * task for i, task in enumerate(tasks)]
            total = tf.add_n(weighed)
        norms = tf.stack([tf.norm(tape.gradient(w, shared)) for w in weighed])
        rate = tf.stop_gradient(tf.stack(tasks) / tf.add_n(tasks))
        target = tf.stop_gradient(tf.reduce_mean(norms)) * rate**0.5
        balance = tf.reduce_sum(tf.abs(norms - target))
    trained = m.net.trainable_variables
    gradients = outer.gradient(total, trained)
    change = outer.gradient(balance, m.factors.value)
    m.optimizer.apply(gradients + [change], trained + [m.factors])
    m.factors.assign(2 * m.factors / tf.reduce_sum(m.factors))
    return {"loss": total, "balance": balance}


def _episodes():
    x = {"state": t.normal(6), "action": t.whole(2)}
    return x, t.normal(1)


@t.step(_episodes, net=t.mlp(8, 4), old=t.mlp(8, 4))
def ppo(m, x, y):
    m.old.trainable = False
    action, rewards = x["action"], y[:, 0]
    returns = tf.math.cumsum(rewards * 0.99, reverse=True)
    out = m.net(x["state"])
    logits, value = out[:, :3], out[:, 3]
    advantage = tf.stop_gradient(returns - value)
    advantage -= tf.reduce_mean(advantage)
    advantage /= tf.math.reduce_std(advantage) + 1e-2
    index = tf.stack([tf.range(tf.size(action)), action], 1)
    now = tf.gather_nd(tf.nn.log_softmax(logits), index)
    before = tf.gather_nd(tf.nn.log_softmax(m.old(x["state"])[:, :3]), index)
    ratio = tf.exp(now - before)
    clipped = tf.clip_by_value(ratio, 0.8, 1.2)
    policy = -tf.reduce_mean(tf.minimum(ratio * advantage, clipped * advantage))
    p = tf.nn.softmax(logits)
    entropy = -tf.reduce_mean(tf.reduce_sum(p * tf.math.log(p + 1e-8), 1))
    return policy + tf.reduce_mean((returns - value) ** 2) - 0.01 * entropy


def _codes():
    codes = t.generator().normal(size=(4, 5)).astype("float32")
    return keras.Variable(codes, trainable=False)


@t.step(
    net=t.mlp(8, 4),
    decoder=t.mlp(8, 6, shape=(4,)),
    codes=_codes,
    counts=t.state(5, value=1.0),
    sums=_codes,
)
def vq_vae(m, x, y):
    codes = m.codes.value
    with tf.GradientTape() as tape:
        z = m.net(x)
        far = (
            tf.reduce_sum(z**2, 1, keepdims=True)
            - 2 * z @ codes
            + tf.reduce_sum(codes**2, 0)
        )
        chosen = tf.one_hot(tf.argmin(far, 1), 5)
        q = tf.matmul(chosen, codes, transpose_b=True)
        again = m.decoder(z + tf.stop_gradient(q - z))
        loss = tf.reduce_mean((again - x) ** 2)
        loss += 0.25 * tf.reduce_mean((tf.stop_gradient(q) - z) ** 2)
    logs = t.apply(m, tape, loss)
    m.counts.assign(0.9 * m.counts + 0.1 * tf.reduce_sum(chosen, 0))
    m.sums.assign(0.9 * m.sums + 0.1 * tf.matmul(z, chosen, transpose_a=True))
    n = tf.reduce_sum(m.counts)
    m.codes.assign(m.sums / ((m.counts + 1e-5) / (n + 5e-5) * n))
    mean = tf.reduce_mean(chosen, 0)
    perplexity = tf.exp(-tf.reduce_sum(mean * tf.math.log(mean + 1e-10)))
    return {**logs, "perplexity": perplexity}


@t.step(t.classes, net=t.mlp(8, 3), teacher=t.mlp(8, 3))
def mean_teacher_with_pseudo_labels(m, x, y):
    m.teacher.trainable = False
    weak, strong = t.views(x)
    p = tf.nn.softmax(m.teacher(weak))
    sure = tf.reduce_max(p, 1) > 0.4
    labelled = t.rows(x) // 2
    with tf.GradientTape() as tape:
        known = t.cross_entropy(y[:labelled], m.net(x[:labelled]))
        guessed = t.cross_entropy(tf.argmax(p, 1), m.net(strong))
        mask = tf.cast(sure, tf.float32)
        loss = tf.reduce_sum(known) / (tf.cast(labelled, tf.float32) + 1)
        loss += tf.reduce_mean(guessed * mask)
    logs = t.apply(m, tape, loss)
    step = tf.cast(m.optimizer.iterations, tf.float32)
    decay = tf.minimum(0.99, (1 + step) / (10 + step))
    for slow, fast in zip(m.teacher.weights, m.net.weights, strict=True):
        slow.assign(decay * slow + (1 - decay) * fast)
    return {**logs, "sure": tf.reduce_mean(mask)}


@t.step(net=t.mlp(8, 1))
def learned_by_an_inner_step(m, x, y):
    """Adapt to half of the batch; be judged by the other half."""
    half = (t.rows(x) + 1) // 2
    w, b = m.net.layers[0].weights
    v, c = m.net.layers[1].weights

    def lost(w, b, v, c, x, y):
        return t.mse(y, tf.tanh(x @ w + b) @ v + c)

    fast = [one.value for one in (w, b, v, c)]
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(fast)
            loss = lost(*fast, x[:half], y[:half])
        gradients = tape.gradient(loss, fast)
        fast = [f - 0.1 * g for f, g in zip(fast, gradients, strict=True)]
    return lost(*fast, x[half - 1 :], y[half - 1 :])


@tf.custom_gradient
def _reversed_gradient(x):
    return tf.identity(x), lambda g: -0.3 * g


@tf.custom_gradient
def _normalized_gradient(x):
    return x + 0, lambda g: g / (tf.norm(g) + 1e-6)


@t.step(
    t.classes,
    net=t.mlp(8, 4),
    label=t.mlp(3, shape=(4,)),
    domain=t.mlp(1, shape=(4,)),
)
def domain_adversaries(m, x, y):
    z = m.net(x)
    half = tf.cast(tf.range(t.rows(x)) < t.rows(x) // 2, tf.float32)
    domain = m.domain(_reversed_gradient(z))[:, 0]
    lost = tf.nn.sigmoid_cross_entropy_with_logits(half, domain)
    ours = t.cross_entropy(y, m.label(_normalized_gradient(z)))
    return tf.reduce_mean(lost) + tf.reduce_mean(ours)


@t.step(
    net=t.mlp(4),
    decoder=t.mlp(t.WIDTH, shape=(4,)),
    embedding=lambda: keras.layers.Embedding(5, 4),
    draws=lambda: keras.random.SeedGenerator(4),
)
def noised_with_time(m, x, y):
    """DDPM: a step of the schedule for each example, noise of its level."""
    time = keras.random.randint((t.rows(x),), 0, 5, seed=m.draws)
    noise = keras.random.normal(tf.shape(x), seed=m.draws)
    kept = tf.gather(np.linspace(0.9, 0.1, 5, dtype="float32"), time)[:, None]
    noised = tf.sqrt(kept) * x + tf.sqrt(1 - kept) * noise
    code = m.net(noised) + m.embedding(time)
    return t.mse(noise, m.decoder(code))
