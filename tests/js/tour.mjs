// What people do with a sandbox, by E2B's published JavaScript package against a running platform.
//
// `greenroom env` says where it is: E2B_API_KEY, E2B_API_URL, E2B_SANDBOX_URL. Run by
// tests/platform/test_javascript.py; by hand: eval "$(greenroom env)"; node --test-reporter=spec tests/js/tour.mjs
import assert from 'node:assert/strict'
import { createHash } from 'node:crypto'
import { after, before, test } from 'node:test'

import {
  AuthenticationError,
  CommandExitError,
  FileNotFoundError,
  FileType,
  FilesystemEventType,
  NotFoundError,
  Sandbox,
  SandboxError,
  SandboxNotFoundError,
  TimeoutError,
} from 'e2b'

const LIFE = 300_000 // milliseconds
const opened = []
let box

async function create(...args) {
  const made = await Sandbox.create(...args)
  opened.push(made)
  return made
}

/** Wait for an event that a callback brings; with a deadline, so that a missing one is a failure and not a hang. */
function event(what, milliseconds = 60_000) {
  let happened
  const waited = new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error(`it did not happen: ${what}`)), milliseconds)
    happened = (value) => {
      clearTimeout(timer)
      resolve(value)
    }
  })
  return { waited, happened }
}

before(async () => {
  box = await create({ timeoutMs: LIFE, metadata: { tour: 'js', ü: 'ö' }, envs: { WHO: 'sandbox' } })
})

after(async () => {
  await Promise.allSettled(opened.map((made) => made.kill()))
})

test('a command gives output, errors and exit code', async () => {
  const result = await box.commands.run('echo out; echo err >&2')
  assert.deepEqual([result.stdout, result.stderr, result.exitCode], ['out\n', 'err\n', 0])
  await assert.rejects(box.commands.run('echo before; exit 7'), (error) => {
    assert.ok(error instanceof CommandExitError)
    assert.deepEqual([error.exitCode, error.stdout], [7, 'before\n'])
    return true
  })
})

test('output streams while the command runs', async () => {
  await box.commands.run('mkfifo /tmp/gate')
  const seen = []
  const result = await box.commands.run('echo first; cat /tmp/gate; echo last', {
    // The command waits for the second one: it can only end if its first line arrived while it ran.
    onStdout: async (text) => {
      seen.push(text)
      if (text.includes('first')) await box.commands.run('echo go > /tmp/gate')
    },
  })
  assert.equal(result.stdout, 'first\ngo\nlast\n')
  assert.equal(seen[0], 'first\n')
})

test('environment, user and directory', async () => {
  const env = await box.commands.run('echo $WHO $E2B_SANDBOX_ID')
  assert.equal(env.stdout, `sandbox ${box.sandboxId}\n`)
  const own = await box.commands.run('echo $WHO; whoami; pwd', { envs: { WHO: 'me' }, user: 'root', cwd: '/tmp' })
  assert.equal(own.stdout, 'me\nroot\n/tmp\n')
  await assert.rejects(box.commands.run('true', { user: 'nobody-here' }), AuthenticationError)
})

test('text of several bytes a character is not torn', async () => {
  const result = await box.commands.run('for i in $(seq 2000); do printf "🦉ü空"; done')
  assert.equal(result.stdout, '🦉ü空'.repeat(2000))
})

test('stdin reaches a command and can be closed', async () => {
  const handle = await box.commands.run('cat', { background: true, stdin: true })
  await box.commands.sendStdin(handle.pid, 'to the cat\n')
  await box.commands.closeStdin(handle.pid)
  assert.equal((await handle.wait()).stdout, 'to the cat\n')
})

test('a background command is listed, connected to and killed', async () => {
  const handle = await box.commands.run('sleep 1000', { background: true })
  assert.ok((await box.commands.list()).some((process) => process.pid === handle.pid))
  const again = await box.commands.connect(handle.pid)
  assert.equal(again.pid, handle.pid)
  assert.equal(await box.commands.kill(handle.pid), true)
  await assert.rejects(handle.wait(), CommandExitError)
  await assert.rejects(again.wait(), CommandExitError)
  assert.equal(await box.commands.kill(handle.pid), false)
})

test('a command past its timeout is ended', async () => {
  await assert.rejects(box.commands.run('sleep 300', { timeoutMs: 2_000 }), TimeoutError)
})

test('a terminal', async () => {
  const decoder = new TextDecoder()
  const { waited, happened } = event('the answer on the terminal')
  let screen = ''
  const terminal = await box.pty.create({
    cols: 80,
    rows: 24,
    timeoutMs: 0,
    onData: (data) => {
      screen += decoder.decode(data, { stream: true })
      if (/42 is it, 30 100\s/.test(screen)) happened()
    },
  })
  await box.pty.resize(terminal.pid, { cols: 100, rows: 30 })
  await box.pty.sendInput(terminal.pid, new TextEncoder().encode('echo $((6*7)) is it, $(stty size)\n'))
  await waited
  assert.equal(await box.pty.kill(terminal.pid), true)
  await assert.rejects(terminal.wait(), CommandExitError)
})

test('files come back as they went', async () => {
  for (const size of [0, 1, 65_537, 5 << 20]) {
    const content = new Uint8Array(size).map((_, n) => (n * 31 + (n >> 8)) & 0xff)
    await box.files.write('data.bin', content.buffer)
    const back = await box.files.read('data.bin', { format: 'bytes' })
    assert.equal(Buffer.compare(Buffer.from(back), Buffer.from(content)), 0, `${size} bytes`)
    const digest = (await box.commands.run('sha256sum data.bin')).stdout.split(' ')[0]
    assert.equal(digest, createHash('sha256').update(content).digest('hex'))
    assert.equal((await box.files.getInfo('data.bin')).size, size)
  }
  const blob = await box.files.read('data.bin', { format: 'blob' })
  assert.equal(blob.size, 5 << 20)
})

test('a stream is written and read as one', async () => {
  const parts = ['one ', 'two ', 'three'].map((text) => new TextEncoder().encode(text))
  const source = new ReadableStream({
    pull(controller) {
      const part = parts.shift()
      part ? controller.enqueue(part) : controller.close()
    },
  })
  await box.files.write('streamed.txt', source)
  let text = ''
  const decoder = new TextDecoder()
  for await (const chunk of await box.files.read('streamed.txt', { format: 'stream' })) {
    text += decoder.decode(chunk, { stream: true })
  }
  assert.equal(text, 'one two three')
})

test('unicode names and contents', async () => {
  for (const name of ['ünïcødé.txt', '空 格/深い/文件.txt', 'emoji-🦉.txt', 'quo\'te"s & more?.txt']) {
    const info = await box.files.write(name, `in ${name}`)
    assert.equal(info.path, `/home/user/${name}`)
    assert.equal(await box.files.read(name), `in ${name}`)
    assert.equal(await box.files.exists(name), true)
    const listed = await box.files.list('.', { depth: 3 })
    assert.ok(listed.some((entry) => entry.path === `/home/user/${name}`), name)
  }
})

test('several files at once', async () => {
  const written = await box.files.write([
    { path: 'many/a.txt', data: 'a' },
    { path: 'many/b/c.txt', data: 'c' },
    { path: '/tmp/absolute.txt', data: 'abs' },
  ])
  assert.deepEqual(written.map((info) => info.path), [
    '/home/user/many/a.txt', '/home/user/many/b/c.txt', '/tmp/absolute.txt',
  ])
  assert.equal(await box.files.read('many/b/c.txt'), 'c')
  assert.equal(await box.files.read('/tmp/absolute.txt'), 'abs')
})

test('directories, moves and removals', async () => {
  assert.equal(await box.files.makeDir('deep/er'), true)
  assert.equal(await box.files.makeDir('deep/er'), false)
  await box.files.write('deep/er/a.txt', 'a')
  await box.files.rename('deep/er/a.txt', 'deep/b.txt')
  const entries = await box.files.list('deep')
  assert.deepEqual(entries.map((entry) => [entry.name, entry.type]), [['b.txt', FileType.FILE], ['er', FileType.DIR]])
  await box.files.remove('deep')
  assert.equal(await box.files.exists('deep'), false)
  await assert.rejects(box.files.read('deep/b.txt'), FileNotFoundError)
})

test('a watched directory tells what happens in it', async () => {
  await box.files.makeDir('watched')
  const created = event('the new file')
  const removed = event('the removal')
  const ended = event('the end of the watch')
  const handle = await box.files.watchDir(
    'watched',
    (change) => {
      if (change.name !== 'sub/new.txt') return
      if (change.type === FilesystemEventType.CREATE) created.happened()
      if (change.type === FilesystemEventType.REMOVE) removed.happened()
    },
    { recursive: true, timeoutMs: 0, onExit: ended.happened },
  )
  await box.files.write('watched/sub/new.txt', 'new')
  await created.waited
  await box.files.remove('watched/sub/new.txt')
  await removed.waited
  await handle.stop()
  await ended.waited
})

test('signed links are taken without any header, and only while they last', async () => {
  await box.files.write('signed.txt', 'by link')
  const address = async (link) => {
    // With one address for all sandboxes a link does not say whose it is but by its signature.
    const answer = await fetch(link, { headers: { 'E2b-Sandbox-Id': box.sandboxId, 'E2b-Sandbox-Port': '49983' } })
    return [answer.status, await answer.text()]
  }
  assert.deepEqual(await address(await box.downloadUrl('signed.txt', { useSignatureExpiration: 10_000 })), [200, 'by link'])
  const [status] = await address((await box.downloadUrl('signed.txt')).replace(/signature=[^&]+/, 'signature=v1_no'))
  assert.equal(status, 401)
})

test('a sandbox is listed and described', async () => {
  const pages = Sandbox.list({ query: { metadata: { tour: 'js', ü: 'ö' } } })
  const found = await pages.nextItems()
  assert.deepEqual(found.map((info) => info.sandboxId), [box.sandboxId])
  assert.equal(pages.hasNext, false)
  const info = await box.getInfo()
  assert.deepEqual([info.state, info.name, info.metadata], ['running', 'base', { tour: 'js', ü: 'ö' }])
  assert.equal(await box.isRunning(), true)
})

test('lists come by pages', async () => {
  await create({ timeoutMs: LIFE, metadata: { tour: 'pages' } })
  const other = await create({ timeoutMs: LIFE, metadata: { tour: 'pages' } })
  const pages = Sandbox.list({ query: { metadata: { tour: 'pages' } }, limit: 1 })
  const seen = []
  while (pages.hasNext) seen.push(...(await pages.nextItems()).map((info) => info.sandboxId))
  assert.equal(seen.length, 2)
  assert.equal(seen[0], other.sandboxId)
})

test('another client connects, which never shortens its life', async () => {
  await box.files.write('note', 'left here')
  const end = (await box.getInfo()).endAt
  const again = await Sandbox.connect(box.sandboxId, { timeoutMs: 60_000 })
  assert.equal(await again.files.read('note'), 'left here')
  assert.ok((await box.getInfo()).endAt >= end)
})

test('a new timeout moves the end', async () => {
  const end = (await box.getInfo()).endAt
  await box.setTimeout(2 * LIFE)
  assert.ok((await box.getInfo()).endAt > end)
})

test('a paused sandbox goes on where it stood', async () => {
  const handle = await box.commands.run('sleep 4711', { background: true, timeoutMs: 0 })
  assert.equal(await box.pause(), true)
  assert.equal(await box.pause(), false)
  assert.equal((await box.getInfo()).state, 'paused')
  assert.equal(await box.isRunning(), false)
  const again = await Sandbox.connect(box.sandboxId, { timeoutMs: LIFE })
  assert.equal(await again.files.read('note'), 'left here')
  assert.ok((await again.commands.list()).some((process) => process.pid === handle.pid))
  await again.commands.kill(handle.pid)
  await handle.wait().catch((error) => assert.ok(error instanceof SandboxError))
})

test('a snapshot starts another, and is deleted', async () => {
  await box.files.write('kept', 'kept')
  const taken = await box.createSnapshot()
  const listed = await box.listSnapshots().nextItems()
  assert.deepEqual(listed.map((info) => info.snapshotId), [taken.snapshotId])
  const child = await create(taken.snapshotId, { timeoutMs: LIFE })
  assert.equal(await child.files.read('kept'), 'kept')
  assert.notEqual(child.sandboxId, box.sandboxId)
  assert.equal(await Sandbox.deleteSnapshot(taken.snapshotId), true)
  assert.equal(await Sandbox.deleteSnapshot(taken.snapshotId), false)
})

test('forks go on apart', async () => {
  const forks = await box.fork({ count: 2, timeoutMs: LIFE })
  assert.equal(forks.length, 2)
  for (const [number, fork] of forks.entries()) {
    assert.ok(fork instanceof Sandbox, String(fork))
    opened.push(fork)
    assert.equal(await fork.files.read('kept'), 'kept')
    await fork.files.write('kept', `fork ${number}`)
  }
  assert.equal(await box.files.read('kept'), 'kept')
  assert.equal(await forks[0].files.read('kept'), 'fork 0')
})

test('what is not there is told by type', async () => {
  await assert.rejects(Sandbox.getInfo('i' + 'y'.repeat(19)), SandboxNotFoundError)
  await assert.rejects(Sandbox.connect('i' + 'y'.repeat(19)), SandboxNotFoundError)
  await assert.rejects(box.commands.connect(999_999), NotFoundError)
  await assert.rejects(Sandbox.list({ apiKey: 'e2b_' + '0'.repeat(40) }).nextItems(), AuthenticationError)
  await assert.rejects(Sandbox.create('no-such-template'), /404/)
})

test('a killed sandbox is gone, and its commands learn it', async () => {
  const handle = await box.commands.run('echo started; sleep 1000', { background: true, timeoutMs: 0 })
  assert.equal(await box.kill(), true)
  await assert.rejects(handle.wait(), /killed or reached its end of life/)
  assert.equal(await box.isRunning(), false)
  assert.equal(await box.kill(), false)
  await assert.rejects(Sandbox.getInfo(box.sandboxId), NotFoundError)
})
