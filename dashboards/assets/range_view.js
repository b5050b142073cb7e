// Changes of a range within limits: the shortest and the longest range, the lowest and the highest value.
window.overlapscope.rangeMoves = (range, limits) => {
  function show(from, to) {
    const {shortest, longest = Infinity, lowest, highest} = limits // these may change
    const length = Math.min(Math.max(to - from, shortest), longest, highest - lowest)
    const start = Math.min(Math.max((from + to - length) / 2, lowest), highest - length)
    range.setv({start, end: start + length})
  }

  function zoom(factor, at) {
    at ??= (range.start + range.end) / 2
    show(at - (at - range.start) * factor, at + (range.end - at) * factor)
  }

  function move(share) {
    const by = (range.end - range.start) * share
    show(range.start + by, range.end + by)
  }

  return {show, zoom, move}
}

// A figure that is drawn for the range in view: sends the range, at most one request at a time, and changes it.
// limits: as in rangeMoves.
window.overlapscope.rangeView = ({area, figures, range, limits, ask}) => {
  const [root] = figures
  let asked = 0
  let waiting = false
  let stale = false
  let scheduled = false

  function askNow() {
    scheduled = false
    if (waiting) {
      stale = true
      return
    }
    waiting = true
    asked += 1
    ask(asked, Math.max(50, Math.round(root.inner_width || area.clientWidth)))
  }

  function schedule() {
    if (scheduled) return
    scheduled = true
    requestAnimationFrame(askNow)
  }

  // A response comes as one message per source; drawing after each of them would cost several frames.
  const views = figures.map((figure) => Bokeh.index.find_one(figure))

  // Bokeh clears a canvas half a pixel off: what was once drawn in its first row and column would stay.
  function clearWhole({ctx, canvas}) {
    ctx.save()
    ctx.resetTransform()
    ctx.clearRect(0, 0, canvas.width, canvas.height)
    ctx.restore()
  }
  for (const {canvas_view} of views) {
    for (const layer of [canvas_view?.primary, canvas_view?.overlays]) if (layer) layer.clear = () => clearWhole(layer)
  }

  let isPaused = false
  function holdDrawing() {
    if (!isPaused) for (const view of views) view.pause()
    isPaused = true
  }

  // Whether it is the response to the latest request.
  function answered(id) {
    if (isPaused) for (const view of views) view.unpause()
    isPaused = false
    if (id !== asked) return false
    waiting = false
    document.body.dataset.answered = id
    document.querySelector("main").ariaBusy = "false"
    if (stale) {
      stale = false
      schedule()
    }
    return true
  }

  for (const property of ["start", "end"]) range.properties[property].change.connect(schedule)
  root.properties.inner_width.change.connect(schedule)
  return {schedule, holdDrawing, answered, ...window.overlapscope.rangeMoves(range, limits)}
}
