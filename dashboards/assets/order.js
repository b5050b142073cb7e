// Mouse, keys and address of the lanes of collectives. dashboards/plots/order.py decides what is drawn, and what ranks
// have at a number: this script sends requests, at most one of a kind at a time.
window.overlapscope.startOrder = (plot) => {
  const {root, number_range: range} = plot
  const element = (id) => document.getElementById(id)
  const area = element("order")
  const facts = {}
  const takeFacts = () => {
    for (const [name, [value]] of Object.entries(plot.facts.data)) facts[name] = value
  }
  takeFacts()
  const clamp = (value, low, high) => Math.min(Math.max(value, low), Math.max(low, high))

  // --- view -----------------------------------------------------------------------------------------------------
  const view = window.overlapscope.rangeView({
    area,
    figures: [root, plot.axis],
    range,
    limits: {
      shortest: range.min_interval,
      longest: range.max_interval,
      get lowest() { return range.bounds[0] },
      get highest() { return range.bounds[1] },
    },
    ask: (id, width_px) =>
      (plot.view.data = {id: [id], first: [range.start], last: [range.end], width_px: [width_px]}),
  })
  const {show, move} = view
  const zoom = (factor) => view.zoom(factor, pointer)

  function center(number) {
    const half = (range.end - range.start) / 2
    show(number - half, number + half)
  }

  function showPlace() {
    const slider = element("place")
    if (slider && document.activeElement !== slider) slider.value = Math.round((range.start + range.end) / 2)
  }

  // --- selected cell --------------------------------------------------------------------------------------------
  const selected = {lane: plot.selected.data.lane[0], number: plot.selected.data.number[0]}

  function drawSelected() {
    const [top, bottom] = facts.cells_px[selected.lane]
    const {number} = selected
    plot.box.data = {left: [number - 0.5], right: [number + 0.5], top: [top - 1.5], bottom: [bottom + 1.5]}
    const picker = element("number")
    if (picker && document.activeElement !== picker) picker.value = number
    document.body.dataset.selected = `${facts.lanes[selected.lane]} ${number}`
  }

  function select(lane, number) {
    selected.lane = clamp(lane, 0, facts.lanes.length - 1)
    selected.number = clamp(number, facts.oldest, facts.latest)
    drawSelected()
    if (selected.number - 1 < range.start) show(selected.number - 1, selected.number - 1 + range.end - range.start)
    if (selected.number + 1 > range.end) show(selected.number + 1 - range.end + range.start, selected.number + 1)
    askDetails()
    rememberSoon()
  }

  let describing = false
  function askDetails() {
    const {lane, number, step} = plot.details.data
    if (lane[0] === selected.lane && number[0] === selected.number) {
      const picker = element("step")
      if (picker && document.activeElement !== picker) picker.value = step[0] ?? ""
      return
    }
    if (describing) return
    describing = true
    plot.selected.data = {lane: [selected.lane], number: [selected.number]}
  }

  function showDetails() {
    describing = false
    const {lane, number, markup} = plot.details.data
    if (element("details").innerHTML !== markup[0]) element("details").innerHTML = markup[0]
    markLane(facts.lanes[lane[0]])
    document.body.dataset.details = `${facts.lanes[lane[0]]} ${number[0]}`
    askDetails()
  }

  // The side that the selected lane belongs to.
  function markLane(rank) {
    for (const cell of element("details").querySelectorAll("[data-ranks]")) {
      cell.classList.toggle("chosen", cell.dataset.ranks.split(" ").includes(String(rank)))
    }
  }

  let remembering
  function rememberSoon() {
    clearTimeout(remembering)
    const entries = {number: selected.number, rank: facts.lanes[selected.lane]}
    remembering = setTimeout(() => window.overlapscope.setAddress(entries), 150)
  }

  // --- jumps ----------------------------------------------------------------------------------------------------
  let jumps = 0

  function jump(to, from) {
    jumps += 1
    plot.jump.data = {id: [jumps], to: [to], from: [from]}
  }

  function jumped() {
    const {id, number} = plot.jumped.data
    if (id[0] !== jumps) return
    element("jump-note").textContent = number[0] == null ? "no further difference" : ""
    if (number[0] != null) goTo(number[0])
  }

  function goTo(number) {
    if (number < range.start + 1 || number > range.end - 1) center(number)
    select(selected.lane, number)
  }

  const toFirst = () => facts.first != null && goTo(facts.first)
  const keys = {
    ArrowLeft: () => select(selected.lane, selected.number - 1),
    ArrowRight: () => select(selected.lane, selected.number + 1),
    ArrowUp: () => select(selected.lane - 1, selected.number),
    ArrowDown: () => select(selected.lane + 1, selected.number),
    n: () => jump("next", selected.number),
    p: () => jump("previous", selected.number),
    f: toFirst,
    w: () => zoom(0.8),
    s: () => zoom(1.25),
    a: () => move(-0.2),
    d: () => move(0.2),
  }

  window.overlapscope.onKeys(keys)

  // --- tooltips -------------------------------------------------------------------------------------------------
  let pointer = null

  function cellAt({x, y}) {
    const lane = Math.floor(y / facts.lane_px)
    const number = Math.round(x)
    const isThere = lane >= 0 && lane < facts.lanes.length && number >= facts.oldest && number <= facts.latest
    return isThere ? {lane, number} : null
  }

  const tip = window.overlapscope.askingTip({
    area, figure: root, request: plot.pointed, response: plot.tooltip, at: cellAt,
  })

  // --- wiring ---------------------------------------------------------------------------------------------------
  const {on} = window.overlapscope
  on(range, "start", showPlace)
  on(range, "end", showPlace)
  on(plot.cells, "data", view.holdDrawing)
  on(plot.answer, "data", () => view.answered(plot.answer.data.id[0]))
  on(plot.details, "data", showDetails)
  window.addEventListener("followed", followed)
  on(plot.jumped, "data", jumped)
  on(range, "start", tip.leave)
  root.on_event("mousemove", (event) => (pointer = cellAt(event) && event.x))
  // Two quick clicks are one double click to Bokeh, wherever they were.
  for (const click of ["tap", "doubletap"]) {
    root.on_event(click, (event) => {
      const cell = cellAt(event)
      if (cell) select(cell.lane, cell.number)
    })
  }
  area.addEventListener("mouseleave", () => (pointer = null))

  element("next")?.addEventListener("click", keys.n)
  element("previous")?.addEventListener("click", keys.p)
  element("first")?.addEventListener("click", toFirst)
  element("place")?.addEventListener("input", (event) => center(Number(event.target.value)))
  const goes = {number: (value) => goTo(clamp(value, facts.oldest, facts.latest)), step: (value) => jump("step", value)}
  for (const [id, go] of Object.entries(goes)) {
    element(id)?.addEventListener("change", ({target}) => {
      target.blur()
      if (target.value !== "") go(Number(target.value))
    })
  }

  // Another group or other ranks need another figure: the page is reloaded.
  element("group")?.addEventListener("change", ({target}) => {
    window.overlapscope.reloadInPlace({group: target.value, number: null, rank: null, from: null, to: null})
  })
  element("chosen-ranks")?.addEventListener("change", ({target}) => {
    if (!target.reportValidity()) return
    target.blur()
    window.overlapscope.reloadInPlace({ranks: target.value.trim() || null, rank: null})
  })

  let first
  // As many numbers as have room for their texts; what led to the selected one matters more than what followed.
  function showFirst() {
    const length = clamp(Math.round((root.inner_width || area.clientWidth) / 74), 8, 24)
    const start = selected.number - Math.round(0.6 * length) - 0.5
    show(start, start + length)
    first = [range.start, range.end]
  }

  // Who has chosen neither a number nor what is in view is led on to the latest.
  function followed() {
    const query = new URLSearchParams(location.search)
    takeFacts()
    if (!query.has("number")) Object.assign(selected, {lane: plot.details.data.lane[0], number: plot.details.data.number[0]})
    if (!query.has("number") && !query.has("from")) showFirst()
    drawSelected()
    askDetails()
    view.schedule()
  }

  window.overlapscope.paintPlots()
  showFirst()
  window.overlapscope.keepRange(range, show, () => first)
  showPlace() // the range may have been the right one already
  drawSelected()
  showDetails()
  view.schedule()
}
