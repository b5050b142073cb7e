// Recorded steps without a server: each on its own canvas, zoomed and panned together on one time axis.
window.overlapscope.drawSteps = (canvases) => {
  const AXIS_PX = 24
  const LEAST_NS = 200
  const all = Array.from(canvases, (canvas) => JSON.parse(document.getElementById(`${canvas.id}-data`).textContent))
  const first = Math.min(...all.map((data) => data.view[0]))
  const last = Math.max(...all.map((data) => data.view[1]))
  let [from, to] = [first, last]
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name)

  // --- zoom and pan ---------------------------------------------------------------------------------------------
  function show(start, end) {
    const length = Math.min(Math.max(end - start, LEAST_NS), last - first)
    from = Math.min(Math.max(start, first), last - length)
    to = from + length
    for (const step of steps) step.follow()
  }
  const zoom = (factor, at = (from + to) / 2) => show(at - (at - from) * factor, at + (to - at) * factor)
  const pan = (share) => show(from + share * (to - from), to + share * (to - from))
  const showAll = () => show(first, last)

  // A pattern of lines, like the hatches of buckets on the pages.
  function hatch(context, path) {
    const tile = new OffscreenCanvas(9, 9)
    const lines = tile.getContext("2d")
    lines.globalAlpha = 0.32
    lines.lineWidth = path.includes("h") ? 2 : 1
    lines.stroke(new Path2D(path))
    return context.createPattern(tile, "repeat")
  }

  function drawStep(canvas, data) {
    const tip = window.overlapscope.tip(canvas)
    const context = canvas.getContext("2d")
    let width = 0
    let scheduled = false
    const x = (ns) => ((ns - from) / (to - from)) * width
    const ns = (px) => from + (px / width) * (to - from)

    // --- drawing --------------------------------------------------------------------------------------------------
    function schedule() {
      if (scheduled) return
      scheduled = true
      requestAnimationFrame(draw)
    }

    function draw() {
      scheduled = false
      const ratio = window.devicePixelRatio || 1
      width = canvas.clientWidth
      if (!width) return // not visible, as in a notebook that has scrolled on: it is drawn when it has a size
      const height = AXIS_PX + data.height
      canvas.style.height = `${height}px`
      canvas.width = Math.round(width * ratio)
      canvas.height = Math.round(height * ratio)
      context.setTransform(ratio, 0, 0, ratio, 0, 0)
      context.font = "11px system-ui, sans-serif"
      context.textBaseline = "middle"
      drawAxis(height)
      const fills = data.categories.map((name) => color(`--span-${name}`))
      const inks = data.categories.map((name) => color(`--on-span-${name}`))
      const hatches = ["M0,0L9,9", "M3.5,4.5h2", "M0,0L9,9M9,0L0,9"].map((path) => hatch(context, path))
      for (let i = 0; i < data.left.length; i++) {
        const left = x(data.left[i])
        const right = Math.max(x(data.right[i]), left + 1.25)
        if (right < 0 || left > width) continue
        const top = AXIS_PX + data.top[i]
        const tall = data.bottom[i] - data.top[i]
        context.globalAlpha = data.alpha[i]
        context.fillStyle = fills[data.category[i]]
        context.fillRect(left, top, right - left, tall)
        if (data.pattern[i]) {
          context.fillStyle = hatches[data.pattern[i] - 1]
          context.fillRect(left, top, right - left, tall)
        }
        context.globalAlpha = 1
        const visible = Math.max(left, 0)
        const room = Math.min(right, width) - visible - 10
        if (data.label[i] && tall >= 11 && context.measureText(data.label[i]).width < room) {
          context.fillStyle = inks[data.category[i]]
          context.fillText(data.label[i], visible + 5, top + tall / 2)
        }
      }
      context.strokeStyle = color("--exposed")
      context.setLineDash([3, 2])
      for (const [left, right, top, bottom] of data.unfinished) {
        context.strokeRect(x(left), AXIS_PX + top, x(right) - x(left), bottom - top)
      }
      context.setLineDash([])
      canvas.dataset.view = `${Math.round(from)} ${Math.round(to)}`
    }

    function drawAxis(height) {
      const rough = ((to - from) / width) * 110
      const power = 10 ** Math.floor(Math.log10(rough))
      const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough)
      const [unit, size] = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]].find(([, each]) => Math.max(Math.abs(from), Math.abs(to)) >= each) ?? ["ns", 1]
      const digits = Math.max(0, Math.ceil(Math.log10(size / step) - 1e-9))
      for (let tick = Math.ceil(from / step); tick * step <= to; tick++) {
        const at = Math.round(x(tick * step)) + 0.5
        context.fillStyle = color("--grid")
        context.fillRect(at - 0.5, AXIS_PX, 1, height)
        context.fillStyle = color("--muted")
        const text = ((tick * step) / size || 0).toLocaleString("en-US", {minimumFractionDigits: digits, maximumFractionDigits: digits})
        context.fillText(`${text} ${unit}`, at + 4, AXIS_PX / 2)
      }
      context.fillStyle = color("--line")
      context.fillRect(0, AXIS_PX - 1, width, 1)
      for (let top = data.rank_height; top < data.height; top += data.rank_height) {
        context.fillRect(0, AXIS_PX + top, width, 1)
      }
    }

    // The wheel scrolls the page; it zooms the timeline once that has been clicked, or with Ctrl.
    canvas.addEventListener("wheel", (event) => {
      if (document.activeElement !== canvas && !event.ctrlKey) return
      event.preventDefault()
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / width)
      else zoom(Math.exp(event.deltaY / 400), ns(event.offsetX))
    }, {passive: false})

    let dragged = null
    canvas.addEventListener("pointerdown", (event) => {
      dragged = event.clientX
      canvas.setPointerCapture(event.pointerId)
    })
    canvas.addEventListener("pointerup", () => (dragged = null))
    canvas.addEventListener("pointercancel", () => (dragged = null))
    canvas.addEventListener("dblclick", showAll)
    canvas.addEventListener("keydown", (event) => {
      const acts = {
        "+": () => zoom(0.7), "=": () => zoom(0.7), w: () => zoom(0.7), "-": () => zoom(1 / 0.7), s: () => zoom(1 / 0.7),
        ArrowLeft: () => pan(-0.2), a: () => pan(-0.2), ArrowRight: () => pan(0.2), d: () => pan(0.2),
        0: showAll, Home: showAll,
      }
      const act = acts[event.key]
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return
      event.preventDefault()
      act()
    })

    // --- tooltips -------------------------------------------------------------------------------------------------
    function spanAt(px, py) {
      let best = -1
      let nearest = 4
      for (let i = 0; i < data.left.length; i++) {
        if (py < data.top[i] || py > data.bottom[i]) continue
        const away = Math.max(x(data.left[i]) - px, px - x(data.right[i]), 0)
        const isShorter = best >= 0 && data.right[i] - data.left[i] < data.right[best] - data.left[best]
        if (away < nearest || (away === 0 && isShorter)) {
          nearest = away
          best = i
        }
      }
      return best
    }

    canvas.addEventListener("pointermove", (event) => {
      if (dragged !== null) {
        const moved = dragged - event.clientX
        dragged = event.clientX
        return pan(moved / width)
      }
      const span = spanAt(event.offsetX, event.offsetY - AXIS_PX)
      if (span < 0) return tip.hide()
      const [title, lines] = data.tip[span]
      tip.fill(title, lines.map(([label]) => label), lines.map(([, value]) => value))
      tip.place({sx: event.offsetX, sy: event.offsetY})
    })
    canvas.addEventListener("pointerleave", tip.hide)

    new ResizeObserver(schedule).observe(canvas.parentElement)
    function follow() {
      tip.hide()
      schedule()
    }
    return {draw, follow}
  }

  const steps = Array.from(canvases, (canvas, place) => drawStep(canvas, all[place]))
  return () => steps.forEach((step) => step.draw())
}

document.addEventListener("DOMContentLoaded", () => {
  const drawAll = window.overlapscope.drawSteps(document.querySelectorAll(".step-drawing canvas"))
  new MutationObserver(drawAll).observe(document.documentElement, {attributeFilter: ["data-theme"]})
  drawAll()
})
